(root => {
  if (root.dataset.on) return; root.dataset.on = 1;
  const words = [...root.querySelectorAll('.lm-word')], says = root.querySelector('.lm-says');
  const jump = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: 5, ArrowUp: -5, Home: -1e6, End: 1e6};
  let show = i => { says.textContent = words[i].title };
  const pick = (i, focus) => {
    words.forEach((w, k) => {
      w.tabIndex = k == i ? 0 : -1; w.setAttribute('aria-pressed', k == i) });
    if (focus) words[i].focus();
    show(i) };
  words.forEach((w, i) => {
    w.onclick = () => pick(i);
    w.onkeydown = e => { const d = jump[e.key]; if (!d) return;
      e.preventDefault(); pick(Math.max(0, Math.min(words.length - 1, i + d)), 1) } });
  root.querySelector('.lm-words').onpointermove = e => { // A finger that slides along a line
    const w = e.buttons && document.elementFromPoint(e.clientX, e.clientY);
    const i = w ? words.indexOf(w.closest('.lm-word')) : -1; if (i >= 0) pick(i) };
  BODY
})(document.getElementById('ID'));
