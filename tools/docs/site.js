// Light or dark, copy buttons, and the search. Nothing on a page needs this file to be read.
const root = document.currentScript.dataset.root
const $ = query => document.querySelector(query)
const make = (tag, props = {}, ...children) => { const e = Object.assign(document.createElement(tag), props); e.append(...children); return e }

// Light or dark
$("#lm-theme").hidden = false
$("#lm-theme").onclick = () => {
  const now = document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")
  const next = document.documentElement.dataset.theme = now == "dark" ? "light" : "dark"
  try { localStorage.theme = next } catch {}            // A browser may forbid it: then the choice holds for this page
}

// The sidebar shows where the reader is
$(".sidebar").scrollTop = ($("[aria-current]")?.offsetTop ?? 0) - $(".sidebar").clientHeight / 2

// Copy buttons
if (navigator.clipboard) for (const area of document.querySelectorAll(".input_area, .text_cell .highlight")) {
  const copy = make("button", {className: "copy", type: "button", textContent: "Copy"})
  copy.onclick = async () => { await navigator.clipboard.writeText(area.querySelector("pre").innerText.trimEnd()); copy.textContent = "Copied" }
  area.append(copy)
}

// Search. search-index.js sets `searchIndex`: [page, title, [[id, heading, text], ...]] for each page, and is read when first needed.
const box = $("#lm-search"), input = $("#lm-search input"), list = $("#lm-search ol"), status_ = $("#lm-search [role=status]")
const wordStart = (text, term) => { const i = text.indexOf(term); return i >= 0 && (i == 0 || !/[\p{L}\p{N}]/u.test(text[i - 1])) }

// How well a section answers: each word must stand in it, in its heading or in the page's title
function score(terms, title, heading, text) {
  let sum = 0
  for (const term of terms) {
    let s = heading == term ? 200 : wordStart(heading, term) ? 40 : heading.includes(term) ? 20 : 0
    s += wordStart(title, term) ? 10 : title.includes(term) ? 4 : 0
    s += wordStart(text, term) ? 4 : text.includes(term) ? 1 : 0
    if (!s) return 0
    sum += s
  }
  return sum
}

function search(query) {
  const terms = query.toLowerCase().split(/\s+/).filter(Boolean), found = []
  if (terms.length) for (const [page, title, sections] of searchIndex) for (const [id, heading, text] of sections) {
    const s = score(terms, title.toLowerCase(), heading.toLowerCase(), text.toLowerCase())
    if (s) found.push({s: s + (id ? 0 : 3), page, title, id, heading, text})
  }
  return {terms, found: found.sort((a, b) => b.s - a.s)}
}

// `text` with the words of the query marked, cut to the neighbourhood of the first of them if `around` is given
function marked(text, terms, around) {
  const at = Math.min(...terms.map(t => text.toLowerCase().indexOf(t)).filter(i => i >= 0), text.length)
  const from = around && at < text.length ? Math.max(0, at - around) : 0, to = around ? from + 2 * around : text.length
  const cut = (from ? "…" : "") + text.slice(from, to) + (to < text.length ? "…" : "")
  const pattern = new RegExp("(" + terms.map(t => t.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|") + ")", "i")
  return cut.split(pattern).map((part, i) => i % 2 ? make("mark", {}, part) : part)
}

function show() {
  const {terms, found} = search(input.value), most = 30
  status_.textContent = !terms.length ? "" : found.length > most ? `${found.length} places, the best ${most}:` : `${found.length} place${found.length == 1 ? "" : "s"}`
  list.replaceChildren(...found.slice(0, most).map(r => make("li", {}, make("a", {href: root + r.page + (r.id ? "#" + r.id : "")},
    make("b", {}, ...marked(r.title + (r.heading ? " › " + r.heading : ""), terms)), make("span", {}, ...marked(r.text, terms, 90))))))
}

function open_() {
  if (!box.open) box.showModal()
  input.select()
  if (window.searchIndex) return show()
  status_.textContent = "Reading the index …"
  if (!$("#lm-index")) document.head.append(make("script", {id: "lm-index", src: root + "search-index.js", onload: show,
    onerror() { status_.textContent = "The index can't be read."; this.remove() }}))
}

$("#lm-find").hidden = false
$("#lm-find").onclick = open_
input.oninput = () => window.searchIndex && show()
addEventListener("keydown", e => {
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(e.target.tagName) || e.target.isContentEditable
  if (e.key == "/" && !typing && !e.ctrlKey && !e.metaKey && !e.altKey || e.key == "k" && (e.ctrlKey || e.metaKey)) { e.preventDefault(); open_() }
})
box.onkeydown = e => {
  const stops = [input, ...list.querySelectorAll("a")], i = stops.indexOf(document.activeElement)
  const to = {ArrowDown: stops[i + 1], ArrowUp: stops[i - 1]}[e.key]
  if (e.key == "ArrowDown" || e.key == "ArrowUp") { e.preventDefault(); to?.focus() }
  if (e.key == "Enter" && i == 0 && stops[1]) stops[1].click()
}
box.onclick = e => { if (e.target == box || e.target.closest("a")) box.close() }
