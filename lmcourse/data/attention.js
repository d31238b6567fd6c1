const {heads, weights} = root.querySelector('.lm-map').dataset, T = words.length;
const svg = root.querySelector('svg');
const name = i => i ? '“' + words[i].textContent + '”' : 'the start';
const chosen = kind => +root.querySelector('input[name$=' + kind + ']:checked').value;
show = i => {
  const l = chosen('layer'), h = chosen('head'), box = svg.getBoundingClientRect();
  const at = (l*heads + h)*T*(T + 1)/2 + i*(i + 1)/2;
  const row = words.map((w, k) => k > i ? 0 : parseInt(weights.substr(2*(at + k), 2), 16)/255);
  const top = w => { const r = w.getBoundingClientRect();
    return [r.left + r.width/2 - box.left, r.top - box.top] };
  const [x, y] = top(words[i]);
  svg.innerHTML = words.map((w, k) => {
    w.style.background = `rgba(47,127,214,${row[k]/2})`;
    const [a, b] = top(w);
    return k >= i || row[k] < .04 ? '' :
      `<path d="M${x} ${y}C${x} ${y - 26} ${a} ${b - 26} ${a} ${b}" fill="none" stroke="#2f7fd6"
      stroke-opacity=".75" stroke-width="${1 + 5*row[k]}"/>` }).join('');
  const sorted = row.map((v, k) => [v, k]).sort((a, b) => b[0] - a[0]);
  const most = sorted.slice(0, 3).filter((p, n) => !n || p[0] >= .005);
  says.textContent = `Layer ${l + 1}, head ${h + 1}: ${name(i)} puts ` + most.map(([v, k], n) =>
    `${v < .005 ? 'under 1' : Math.round(100*v)}%${n ? '' : ' of its attention'} on ${name(k)}` +
    (k == i ? ' (itself)' : '')).join(', ') + '.' };
const again = () => show(words.findIndex(w => w.tabIndex == 0));
root.querySelectorAll('input').forEach(r => r.onchange = again);
addEventListener('resize', again); new IntersectionObserver(again).observe(root);
