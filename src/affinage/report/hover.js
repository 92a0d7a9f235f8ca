// Shows the values of a chart under the pointer, the finger, or the arrow keys.
for (const figure of document.querySelectorAll("figure[data-values]")) {
  const { x: xLabel, domain: [low, high], series } = JSON.parse(figure.dataset.values);
  const steps = [...new Set(series.flatMap((one) => one.points.map((point) => point[0])))].sort((a, b) => a - b);
  const language = document.documentElement.lang;
  const write = (value) => value.toLocaleString(language, { maximumSignificantDigits: 5 });
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  figure.append(tip);
  const nearest = (list, wanted, at) =>
    list.reduce((best, item) => (Math.abs(at(item) - wanted) < Math.abs(at(best) - wanted) ? item : best));

  for (const svg of steps.length ? figure.querySelectorAll("svg.chart") : []) {
    const plot = svg.querySelector(".background");
    let left = 0, right = 1, top = 0, bottom = 1, scale = 1;
    const measure = () => {
      const whole = svg.getBoundingClientRect(), inner = plot.getBoundingClientRect();
      scale = whole.width / svg.viewBox.baseVal.width || 1;
      [left, right] = [inner.left, inner.right].map((x) => (x - whole.left) / scale);
      [top, bottom] = [inner.top, inner.bottom].map((y) => (y - whole.top) / scale);
    };
    const place = (step) => left + ((step - low) / (high - low)) * (right - left);
    const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
    cursor.setAttribute("class", "cursor");
    let shown = 0;

    const hide = () => { tip.hidden = true; cursor.remove(); };
    const show = (step) => {
      shown = steps.indexOf(step);
      measure();
      const at = place(step);
      for (const [name, value] of [["x1", at], ["x2", at], ["y1", top], ["y2", bottom]]) cursor.setAttribute(name, value);
      svg.append(cursor);
      tip.replaceChildren();
      const head = document.createElement("b");
      head.textContent = `${xLabel} ${write(step)}`;
      tip.append(head);
      for (const one of series) {
        const point = nearest(one.points, step, (p) => p[0]);
        if (Math.abs(place(point[0]) - at) > 12) continue;
        const line = document.createElement("div");
        line.textContent = `${write(point[1])} ${one.label}`;
        tip.append(line);
      }
      tip.hidden = false;
      const room = figure.clientWidth - tip.offsetWidth;
      tip.style.left = `${Math.max(0, Math.min(room, at * scale + 12))}px`;
      tip.style.top = `${svg.parentNode.offsetTop + top * scale + 4}px`;
    };
    svg.tabIndex = 0;
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      measure();
      show(nearest(steps, ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width, place));
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (move) { event.preventDefault(); show(steps[Math.max(0, Math.min(steps.length - 1, shown + move))]); }
    });
  }
}
