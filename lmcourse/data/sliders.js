(root => {
  if (root.dataset.on) return; root.dataset.on = 1;
  const knobs = [...root.querySelectorAll('input')];
  const pictures = [...root.lastElementChild.children];
  const show = () => {
    let at = 0;
    for (const k of knobs) {
      const text = JSON.parse(k.dataset.values)[k.value];
      k.nextElementSibling.textContent = text; k.setAttribute('aria-valuetext', text);
      at = at*(+k.max + 1) + +k.value }
    pictures.forEach((p, i) => { p.style.display = i == at ? '' : 'none' }) };
  knobs.forEach(k => { k.oninput = show }); show();
})(document.getElementById('ID'));
