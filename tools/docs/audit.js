// What is wrong with the page as it is laid out now: a list of sentences. Run by tools/check_site.py in the browser.
({contrast, structure, phone}) => {
  const faults = [], all = query => [...document.querySelectorAll(query)]
  const words = e => (e.getAttribute("aria-label") || e.textContent || "").trim() || [...e.querySelectorAll("img[alt]")].map(i => i.alt).join(" ").trim()
  const name = e => `<${e.tagName.toLowerCase()}${e.className && e.className.baseVal === undefined ? ` class="${e.className}"` : ""}> "${words(e).slice(0, 40)}"`
  const shown = e => e.checkVisibility({visibilityProperty: true}) && e.getClientRects().length > 0

  if (structure) {
    if (!document.documentElement.lang) faults.push("the page has no lang")
    if (!document.title.trim()) faults.push("the page has no title")
    if (!document.querySelector('meta[name="description"]')?.content.trim()) faults.push("the page has no description")
    const headings = all("h1, h2, h3, h4, h5, h6")
    const tops = headings.filter(h => h.tagName == "H1").length
    if (tops != 1) faults.push(`${tops} headings of the first level, expected 1`)
    headings.forEach((h, i) => { if (i && +h.tagName[1] > +headings[i - 1].tagName[1] + 1) faults.push(`${name(h)} follows an ${headings[i - 1].tagName.toLowerCase()}`) })
    for (const i of all("img")) {
      if (!i.alt.trim().includes(" ") || /\.(png|svg|jpe?g)$/i.test(i.alt)) faults.push(`alt text "${i.alt}" of ${i.getAttribute("src").slice(-40)} says nothing`)
      i.loading = "eager"
    }
    for (const a of all("a[href]")) if (!words(a)) faults.push(`a link without text to ${a.getAttribute("href")}`)
    for (const b of all("button, summary, [role=button]")) if (!words(b)) faults.push(`a ${b.tagName.toLowerCase()} without a name`)
    for (const i of all("input:not([type=hidden]), select, textarea")) if (!i.labels?.length && !i.getAttribute("aria-label")) faults.push(`an input without a label (${i.type})`)
    const seen = new Set()
    for (const e of all("[id]")) { if (seen.has(e.id)) faults.push(`the id ${e.id} stands twice`); seen.add(e.id) }
  }

  if (contrast) {
    const rgba = text => { const n = text.match(/[\d.]+/g).map(Number); return [n[0], n[1], n[2], n[3] ?? 1] }
    const over = (top, under) => [0, 1, 2].map(i => top[i]*top[3] + under[i]*(1 - top[3])).concat(1)
    const light = c => { const [r, g, b] = c.slice(0, 3).map(v => (v /= 255) <= .04045 ? v/12.92 : ((v + .055)/1.055)**2.4); return .2126*r + .7152*g + .0722*b }
    const probe = document.body.appendChild(document.createElement("i")), memo = new Map()
    probe.style.background = "Canvas"
    const canvas = rgba(getComputedStyle(probe).backgroundColor)
    probe.remove()
    const ground = e => {                                              // [the colour behind what `e` holds, its opacity]
      if (!e) return [canvas, 1]
      if (!memo.has(e)) {
        const s = getComputedStyle(e), [under, opacity] = ground(e.parentElement), own = rgba(s.backgroundColor)
        own[3] *= +s.opacity
        memo.set(e, [own[3] ? over(own, under) : under, opacity*s.opacity])
      }
      return memo.get(e)
    }
    const bad = new Map(), walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
    for (let node; node = walk.nextNode();) {
      const e = node.parentElement
      if (!node.data.trim() || !shown(e) || e.closest(".katex-mathml, .skip, dialog:not([open])")) continue
      const [behind, opacity] = ground(e), ink = rgba(getComputedStyle(e).color)
      if (!opacity || !ink[3]) continue
      ink[3] *= opacity
      const [a, b] = [light(over(ink, behind)), light(behind)].sort((x, y) => y - x), ratio = (a + .05)/(b + .05)
      if (ratio < 4.5) { const key = `${ink} on ${behind.slice(0, 3).map(Math.round)}`; bad.set(key, bad.get(key) || [ratio, name(e), 0]); bad.get(key)[2]++ }
    }
    for (const [key, [ratio, where, n]] of bad) faults.push(`contrast ${ratio.toFixed(2)} (${key}) in ${where}, ${n} time${n == 1 ? "" : "s"}`)
  }

  if (phone) {
    const width = document.documentElement.clientWidth
    if (document.documentElement.scrollWidth > width) {
      const wide = all("body *").filter(e => shown(e) && e.getBoundingClientRect().right > width + 1 && !e.closest("pre, table, .katex-display")).pop()
      faults.push(`${document.documentElement.scrollWidth - width} pixels wider than the screen${wide ? ": " + name(wide) : ""}`)
    }
    for (const e of all("header a, header button, header label, nav a, .contents a, button, summary, footer .turn a, .facts a")) {
      if (!shown(e) || e.closest("dialog:not([open]), .lm-words")) continue // Tokens of a text: a finger slides along them
      const {width, height} = e.getBoundingClientRect()
      if (Math.min(width, height) < 24) faults.push(`${Math.round(width)} by ${Math.round(height)} pixels to tap: ${name(e)}`)
    }
  }
  return faults
}
