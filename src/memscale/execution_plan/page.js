"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const UNITS = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

  // As memscale.units.format_bytes writes it.
  function formatBytes(size) {
    if (size < 1024) return `${size} B`;
    let power = 0, hundredths = size * 100;
    while (hundredths >= 102400 && power < UNITS.length) {
      power += 1;
      hundredths = Math.floor((size * 100 + 1024 ** power / 2) / 1024 ** power);
    }
    const fraction = String(hundredths % 100).padStart(2, "0").replace(/0$/, "");
    return `${Math.floor(hundredths / 100)}.${fraction} ${UNITS[power - 1]}`;
  }

  const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
  const shortened = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
  const color = (name) => `var(--${name.replaceAll(" ", "-")})`;

  // Text goes in as text, never as markup: names come from the user's model.
  function element(tag, attributes = {}, ...children) {
    const svg = /^(svg|g|path|line|text|circle|rect|polygon)$/.test(tag);
    const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function swatch(name) {
    const made = element("span", { class: "swatch", "aria-hidden": "true" });
    made.style.setProperty("--c", color(name));
    return made;
  }

  // Ticks at 1, 2 or 5 times a power: of two for bytes, of ten for ratios.
  function ticks(low, high, count, base) {
    const raw = (high - low) / count;
    const power = base ** Math.floor(Math.log(raw) / Math.log(base));
    const steps = base === 2 ? [1, 2] : [1, 2, 2.5, 5, 10];
    const step = power * steps.find((each) => each * power >= raw * 0.999);
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9); at * step <= high * (1 + 1e-9); at++) found.push(at * step);
    return found;
  }

  // A chart that pointer and keys move along: a slider to assistive technology, as a range input is.
  function explore(plot, chart) {
    const tip = element("div", { class: "tip", hidden: "" });
    let at = chart.start, view = null;

    function draw() {
      const width = plot.clientWidth;
      if (!width) return;
      plot.querySelector("svg")?.remove();
      view = chart.draw(width);
      plot.prepend(view.svg);
      if (!tip.hidden) show(at);
    }

    function announce() {
      plot.setAttribute("aria-valuenow", at);
      plot.setAttribute("aria-valuetext", chart.text(at));
    }

    function show(index) {
      at = Math.max(0, Math.min(chart.count - 1, index));
      announce();
      view.point(at);
      tip.replaceChildren(...chart.tip(at));
      tip.hidden = false;
      const x = view.x(at), width = tip.offsetWidth, room = plot.clientWidth;
      const left = x + 14 + width > room ? x - 14 - width : x + 14;
      tip.style.left = `${Math.max(0, Math.min(room - width, left))}px`;
    }

    function hide() {
      tip.hidden = true;
      view?.point(null);
    }

    const keys = {
      ArrowRight: () => at + 1, ArrowUp: () => at + 1, ArrowLeft: () => at - 1, ArrowDown: () => at - 1,
      PageUp: () => at + 10, PageDown: () => at - 10, Home: () => 0, End: () => chart.count - 1,
      p: () => chart.start, P: () => chart.start,
    };
    plot.setAttribute("aria-valuemin", 0);
    plot.setAttribute("aria-valuemax", chart.count - 1);
    announce();
    plot.append(tip);
    const move = (event) => {
      const box = plot.getBoundingClientRect();
      show(view.nearest(event.clientX - box.left, event.clientY - box.top));
    };
    plot.addEventListener("pointermove", move);
    plot.addEventListener("pointerdown", move);
    // A finger leaves as soon as it is lifted: what it showed stays until another place is touched.
    plot.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse" && !plot.matches(":focus-visible")) hide();
    });
    plot.addEventListener("focus", () => { if (plot.matches(":focus-visible")) show(at); });
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return hide();
      if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      show(keys[event.key]());
    });
    new ResizeObserver(draw).observe(plot);
    return draw;
  }

  // Memory over a step -----------------------------------------------------------------------------

  const HEIGHT = 300, TOP = 50, BOTTOM = 26, LEFT = 62, RIGHT = 6;
  let sameScale = true;
  const highest = (step) => sum(step.samples[step.peak]);
  const scaleOf = (step) => (sameScale ? Math.max(...data.steps.map(highest)) : highest(step));

  function phaseAt(step, index) {
    return step.phases.filter((phase) => phase.begin <= index).at(-1).name;
  }

  function memoryChart(step) {
    const count = step.samples.length;
    const heading = (at) => `${at === step.peak ? "Peak, " : ""}${phaseAt(step, at)}, part ${at + 1} of ${count}`;
    const uses = (at) => step.categories.map((name, index) => [name, step.samples[at][index]]).filter(([, size]) => size);

    function draw(width) {
      const svg = element("svg", { height: HEIGHT, "aria-hidden": "true" });
      const most = scaleOf(step) * 1.02, right = width - RIGHT, bottom = HEIGHT - BOTTOM;
      const x = (at) => LEFT + (at / count) * (right - LEFT);
      const y = (size) => bottom - (size / most) * (bottom - TOP);
      for (const size of ticks(0, most, 8, 2)) {
        svg.append(element("line", { class: "grid", x1: LEFT, x2: right, y1: y(size), y2: y(size) }));
        const label = formatBytes(size).replace(/\.0 /, " ");
        svg.append(element("text", { x: LEFT - 8, y: y(size) + 4, "text-anchor": "end" }, size ? label : "0"));
      }
      const below = new Array(count).fill(0);
      const labels = [];
      step.categories.forEach((name, category) => {
        const low = below.slice();
        step.samples.forEach((sample, at) => { below[at] += sample[category]; });
        const edge = (levels) => levels.map((level, at) => `${x(at).toFixed(1)},${y(level).toFixed(1)} ${x(at + 1).toFixed(1)},${y(level).toFixed(1)}`);
        const path = `M${edge(below).join(" ")} ${edge(low).reverse().map((pair) => pair.split(" ").reverse().join(" ")).join(" ")}Z`;
        const area = element("path", { d: path, "data-category": name, stroke: "var(--surface)", "stroke-width": "0.8" });
        area.style.fill = color(name);
        svg.append(area);
        const label = insideLabel(name, low, below, x, y, [step.peak, ...step.phases.map((phase) => phase.begin)]);
        if (label) labels.push(label);
      });
      svg.append(...labels);
      step.phases.forEach((phase, index) => {
        const end = step.phases[index + 1]?.begin ?? count;
        if (end <= phase.begin) return;
        const at = x(phase.begin);
        svg.append(element("line", { class: "axis", x1: at, x2: at, y1: bottom, y2: bottom + 6 }));
        if (index) svg.append(element("line", { class: "grid dash", x1: at, x2: at, y1: TOP, y2: bottom }));
        const room = x(end) - at, short = phase.name === "optimizer step" && room < 86 ? "optimizer" : phase.name;
        if (room > short.length * 5.6) svg.append(element("text", { x: at + 4, y: bottom + 18 }, short));
      });
      svg.append(element("line", { class: "axis", x1: LEFT, x2: right, y1: bottom, y2: bottom }));
      if (data.limit && data.limit <= most) {
        svg.append(element("line", { class: "mark dash", x1: LEFT, x2: right, y1: y(data.limit), y2: y(data.limit) }));
        svg.append(element("text", { class: "halo", x: right, y: y(data.limit) - 5, "text-anchor": "end" }, `device: ${formatBytes(data.limit)}`));
      }
      const peakX = x(step.peak + 0.5), peakY = y(highest(step));
      const [held, mostHeld] = uses(step.peak).reduce((best, use) => (use[1] > best[1] ? use : best), ["", 0]);
      const lines = [
        `Peak ${formatBytes(highest(step))}`,
        `in ${step.where || phaseAt(step, step.peak)}`,
        `${Math.round((100 * mostHeld) / highest(step))}% ${held}`,
      ].map((line) => shortened(line, (right - LEFT) / 6.2));
      const widest = 6.2 * Math.max(...lines.map((line) => line.length));
      const left = Math.max(LEFT + 2, Math.min(peakX - 4, right - widest));
      svg.append(
        element("line", { class: "peak dash", x1: peakX, x2: peakX, y1: peakY, y2: bottom }),
        element("circle", { class: "mark", cx: peakX, cy: peakY, r: 4, fill: "var(--surface)" }),
        ...lines.map((line, index) => element("text", { class: index ? "halo" : "strong halo", x: left, y: peakY - 37 + 14 * index }, line)),
      );
      const cursor = element("line", { class: "cursor", y1: TOP - 6, y2: bottom, visibility: "hidden" });
      svg.append(cursor);
      return {
        svg,
        x: (at) => x(at + 0.5),
        nearest: (left) => Math.floor(((left - LEFT) / (right - LEFT)) * count),
        point(at) {
          cursor.setAttribute("visibility", at === null ? "hidden" : "visible");
          if (at === null) return;
          cursor.setAttribute("x1", x(at + 0.5));
          cursor.setAttribute("x2", x(at + 0.5));
        },
      };
    }

    return {
      count, start: step.peak, draw,
      text: (at) => `${heading(at)}: ${formatBytes(sum(step.samples[at]))} in use, ${step.how}. ${uses(at).map(([name, size]) => `${name} ${formatBytes(size)}`).join(", ")}.`,
      tip(at) {
        const rows = uses(at).reverse().map(([name, size]) =>
          element("tr", {}, element("td", {}, swatch(name), name), element("td", {}, formatBytes(size))));
        return [element("b", {}, formatBytes(sum(step.samples[at]))), heading(at), element("table", {}, ...rows)];
      },
    };
  }

  // A name goes into its area where that is thick enough for it, so that colour is not needed to tell areas apart.
  function insideLabel(name, low, high, x, y, lines) {
    const wide = name.length * 6.6 + 10, window = Math.ceil(wide / (x(1) - x(0)));
    let best = null;
    for (let at = 0; at + window <= low.length; at++) {
      if (lines.some((line) => at < line && line < at + window)) continue;
      let top = -Infinity, bottom = Infinity;
      for (let each = at; each < at + window; each++) {
        top = Math.max(top, y(high[each]));
        bottom = Math.min(bottom, y(low[each]));
      }
      if (bottom - top >= 15 && (!best || bottom - top > best.room + 0.5)) best = { room: bottom - top, at, middle: (top + bottom) / 2 };
    }
    return best && element("text", { class: "inside", x: (x(best.at) + x(best.at + window)) / 2, y: best.middle + 4, "text-anchor": "middle" }, name);
  }

  // Trades -----------------------------------------------------------------------------------------

  const SHAPES = {
    plain: (x, y) => element("circle", { cx: x, cy: y, r: 5.5, fill: "var(--surface)" }),
    chosen: (x, y) => element("polygon", { points: `${x},${y - 8} ${x + 8},${y} ${x},${y + 8} ${x - 8},${y}`, fill: "var(--accent)" }),
    conservative: (x, y) => element("polygon", { points: `${x},${y - 6} ${x + 6},${y + 5} ${x - 6},${y + 5}`, fill: "var(--surface)" }),
    balanced: (x, y) => element("rect", { x: x - 5, y: y - 5, width: 10, height: 10, fill: "var(--surface)" }),
    aggressive: (x, y) => element("polygon", { points: `${x},${y + 6} ${x + 6},${y - 5} ${x - 6},${y - 5}`, fill: "var(--surface)" }),
  };

  function tradesChart({ points, marks }) {
    const all = [...points, ...marks].sort((a, b) => a.ratio - b.ratio || b.peak - a.peak);
    const words = (point) => `${point.label}: ${formatBytes(point.peak)} ${point.how}, ${point.ratio.toFixed(2)} × the plain step time, estimated`;

    function draw(width) {
      const height = width < 500 ? 300 : 340, bottom = height - 40, right = width - 14;
      const svg = element("svg", { height, "aria-hidden": "true" });
      const most = Math.max(...all.map((point) => point.peak)) * 1.06;
      const ratios = all.map((point) => point.ratio);
      const span = Math.max(...ratios) - Math.min(...ratios) || 1;
      const low = Math.min(...ratios) - span * 0.03, high = Math.max(...ratios) + span * 0.05;
      const x = (ratio) => LEFT + ((ratio - low) / (high - low)) * (right - LEFT);
      const y = (size) => bottom - (size / most) * (bottom - 12);
      for (const size of ticks(0, most, 6, 2)) {
        svg.append(element("line", { class: "grid", x1: LEFT, x2: right, y1: y(size), y2: y(size) }));
        svg.append(element("text", { x: LEFT - 8, y: y(size) + 4, "text-anchor": "end" }, size ? formatBytes(size).replace(/\.0 /, " ") : "0"));
      }
      for (const ratio of ticks(low, high, width < 500 ? 4 : 8, 10)) {
        svg.append(element("line", { class: "axis", x1: x(ratio), x2: x(ratio), y1: bottom, y2: bottom + 5 }));
        svg.append(element("text", { x: x(ratio), y: bottom + 18, "text-anchor": "middle" }, `${+ratio.toFixed(3)} ×`));
      }
      svg.append(element("line", { class: "axis", x1: LEFT, x2: right, y1: bottom, y2: bottom }));
      svg.append(element("text", { x: right, y: bottom + 35, "text-anchor": "end" }, "step time, as a multiple of the plain step’s"));
      const corners = points.map((point, index) => `${index ? `H${x(point.ratio).toFixed(1)}V` : `M${x(point.ratio).toFixed(1)},`}${y(point.peak).toFixed(1)}`);
      svg.append(element("path", { d: corners.join(""), fill: "none", stroke: "var(--muted)", "stroke-opacity": "0.55" }));
      for (const point of points) svg.append(element("circle", { cx: x(point.ratio), cy: y(point.peak), r: 2.2, fill: "var(--muted)" }));
      const taken = marks.map((mark) => [x(mark.ratio) - 10, y(mark.peak) - 9, 20, 18]);
      for (const mark of marks) {
        const shape = SHAPES[mark.kind](x(mark.ratio), y(mark.peak));
        shape.classList.add("mark");
        shape.setAttribute("data-mark", mark.kind);
        svg.append(shape);
      }
      for (const mark of marks) {
        const wide = mark.label.length * 6.9, at = [x(mark.ratio), y(mark.peak)];
        const free = ([left, top]) => left >= LEFT && left + wide <= width && top >= 0 && top + 15 <= bottom &&
          taken.every(([l, t, w, h]) => left + wide < l || left > l + w || top + 15 < t || top > t + h) &&
          points.every((point) => x(point.ratio) < left - 3 || x(point.ratio) > left + wide + 3 || y(point.peak) < top - 2 || y(point.peak) > top + 16);
        const places = [[12, -18], [12, -7], [12, 4], [-wide - 12, 4], [-wide - 12, -7], [-wide / 2, -26], [-wide / 2, 11], [18, -34], [-wide - 12, -26]];
        const place = places.map(([dx, dy]) => [at[0] + dx, at[1] + dy]).find(free) ?? [Math.min(at[0] + 12, width - wide), at[1] - 22];
        taken.push([...place, wide, 15]);
        svg.append(element("text", { class: `halo ${mark.kind === "chosen" ? "strong" : ""}`, x: place[0], y: place[1] + 12 }, mark.label));
      }
      const ring = element("circle", { class: "cursor", r: 11, fill: "none", visibility: "hidden" });
      svg.append(ring);
      return {
        svg,
        x: (at) => x(all[at].ratio),
        nearest(left, top) {
          const far = (point) => (x(point.ratio) - left) ** 2 + (y(point.peak) - top) ** 2;
          return all.reduce((best, point, index) => (far(point) < far(all[best]) ? index : best), 0);
        },
        point(at) {
          ring.setAttribute("visibility", at === null ? "hidden" : "visible");
          if (at === null) return;
          ring.setAttribute("cx", x(all[at].ratio));
          ring.setAttribute("cy", y(all[at].peak));
        },
      };
    }

    return {
      count: all.length, start: all.findIndex((point) => point.kind === "chosen"), draw,
      text: (at) => `Point ${at + 1} of ${all.length}. ${words(all[at])}.`,
      tip(at) {
        const point = all[at];
        const rows = [
          [`peak (${point.how})`, formatBytes(point.peak)],
          ["step time (estimated)", `${point.ratio.toFixed(2)} ×`],
          ...(point.budget ? [["memory_budget", formatBytes(point.budget)]] : []),
        ].map(([name, value]) => element("tr", {}, element("td", {}, name), element("td", {}, value)));
        return [element("b", {}, point.label), element("table", {}, ...rows)];
      },
    };
  }

  // The page ---------------------------------------------------------------------------------------

  const drawSteps = data.steps.map((step) => explore(document.getElementById(`memory-${step.id}`), memoryChart(step)));
  const trades = document.getElementById("trades-plot");
  if (trades) explore(trades, tradesChart(data.trades));

  const scale = document.getElementById("scale");
  if (scale) {
    scale.hidden = false;
    scale.addEventListener("click", (event) => {
      const chosen = event.target.closest("button");
      if (!chosen) return;
      sameScale = chosen.dataset.scale === "same";
      for (const button of scale.children) button.setAttribute("aria-pressed", String(button === chosen));
      drawSteps.forEach((draw) => draw());
    });
  }

  const theme = document.getElementById("theme"), prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (prefersDark.matches ? "dark" : "light")) === "dark";
  const named = () => { theme.textContent = isDark() ? "Light theme" : "Dark theme"; };
  theme.hidden = false;
  theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    named();
  });
  prefersDark.addEventListener("change", named);
  named();
})();
