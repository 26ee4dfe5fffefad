(() => {
  "use strict";
  const section = document.querySelector(".whatif");
  if (!section) return;
  const { acceptance, costs, start, rows: measuredRows } = JSON.parse(section.dataset.measured);
  const LEVEL_NODES = 4; // as in decode/costs.py: nodes read by one level of a draft
  const BATCHES = [1, 2, 4, 8, 16, 32, 64];
  const sliders = {};
  for (const input of section.querySelectorAll("input")) sliders[input.name] = input;

  function verify(tokens, growth) {
    const { node_counts: counts, verify_ms: ms } = costs;
    const last = counts.length - 1;
    let above = counts.findIndex((count) => count >= tokens);
    if (above === 0 || last === 0) return ms[0];
    if (above < 0) above = last;
    const slope = (ms[above] - ms[above - 1]) / (counts[above] - counts[above - 1]);
    return ms[0] + growth * (ms[above - 1] + slope * (tokens - counts[above - 1]) - ms[0]);
  }

  function draft(depth, rows, growth) {
    if (!depth) return 0;
    const alone = costs.draft_ms - costs.level_ms * Math.max(0, costs.levels - depth);
    return rows === 1 ? alone : alone * verify(LEVEL_NODES * rows, growth) / verify(LEVEL_NODES, growth);
  }

  // Acceptance by depth and rank after a change to the first draft's: all scale with it.
  function scaled(first) {
    return acceptance.map((ranks) => {
      const wanted = first / acceptance[0][0];
      const factor = Math.min(wanted, 1 / ranks.reduce((sum, share) => sum + share, 0), 0.99 / ranks[0]);
      return ranks.map((share) => share * factor);
    });
  }

  // Tokens per round and depth of the best trees of 1, 2, 3, ... nodes, root included.
  function trees(table, deepest, most) {
    const grown = [{ tau: 1, depth: 0 }];
    const open = table[0].map((prob) => ({ prob, depth: 1 }));
    while (grown.length < most && open.length) {
      let best = 0;
      open.forEach((node, place) => { if (node.prob > open[best].prob) best = place; });
      const [{ prob, depth }] = open.splice(best, 1);
      const before = grown.at(-1);
      grown.push({ tau: before.tau + prob, depth: Math.max(before.depth, depth) });
      if (depth < deepest) for (const share of table[depth]) open.push({ prob: prob * share, depth: depth + 1 });
    }
    return grown;
  }

  function outcome(tau, nodes, depth, rows, growth) {
    const drafting = draft(depth, rows, growth), verifying = verify(rows * nodes, growth);
    const round = drafting + verifying;
    return { tau, round, drafting, verifying, speedup: tau * verify(rows, growth) / round, speed: 1000 * tau * rows / round };
  }

  function write(name, made) {
    const put = (figure, text) => { section.querySelector(`[data-${name}="${figure}"]`).textContent = text; };
    put("tau", made.tau.toFixed(2));
    put("round", `${made.drafting.toFixed(1)} + ${made.verifying.toFixed(1)}`);
    put("speedup", `${made.speedup.toFixed(2)}x`);
    put("speed", made.speed.toFixed(1));
  }

  function draw() {
    const depth = Number(sliders.depth.value), nodes = Number(sliders.nodes.value);
    const asked = Number(sliders.first.value), growth = Number(sliders.growth.value) / 100;
    const first = asked === start.first ? acceptance[0][0] : asked / 100;
    const rows = BATCHES[Number(sliders.batch.value)];
    const shown = {
      depth: `${depth} token${depth > 1 ? "s" : ""}`, nodes: `${nodes} with the root`, first: `${asked} %`,
      growth: `${growth.toFixed(2)} times as measured`, batch: `${rows}`,
    };
    for (const [name, text] of Object.entries(shown)) {
      section.querySelector(`output[for="whatif-${name}"]`).textContent = text;
      sliders[name].setAttribute("aria-valuetext", text);
    }
    const grown = trees(scaled(first), depth, Number(sliders.nodes.max));
    const curve = grown.map((tree, place) => outcome(tree.tau, place + 1, tree.depth, rows, growth).speedup);
    const place = Math.min(nodes, grown.length) - 1;
    write("tree", outcome(grown[place].tau, place + 1, grown[place].depth, rows, growth));
    write("textbook", outcome((1 - first ** (depth + 1)) / (1 - first), depth + 1, depth, rows, growth));
    const best = curve.indexOf(Math.max(...curve));
    section.querySelector("[data-best]").textContent = best
      ? `Best here: ${best + 1} nodes, ${curve[best].toFixed(2)}x.` : "Here nothing pays: plain decoding is fastest.";
    plot(curve, place);
  }

  function plot(curve, place) {
    const svg = section.querySelector("svg");
    const top = Math.max(1.2, ...curve) * 1.15;
    const x = (at) => 34 + 436 * at / Math.max(1, Number(sliders.nodes.max) - 1);
    const y = (speedup) => 164 - 150 * speedup / top;
    svg.querySelector(".curve").setAttribute("d", curve.map((value, at) => `${at ? "L" : "M"}${x(at)} ${y(value)}`).join(""));
    for (const key of ["y1", "y2"]) svg.querySelector(".even").setAttribute(key, y(1));
    svg.querySelector(".one").setAttribute("y", y(1) + 4);
    svg.querySelector(".here").setAttribute("x", Math.min(440, x(place) + 10));
    svg.querySelector(".here").setAttribute("y", y(curve[place]) - 8);
    svg.querySelector(".here").textContent = `${curve[place].toFixed(2)}x`;
    svg.querySelector("circle").setAttribute("cx", x(place));
    svg.querySelector("circle").setAttribute("cy", y(curve[place]));
  }

  function reset() {
    for (const [name, value] of Object.entries(start)) sliders[name].value = value;
    sliders.batch.value = Math.max(0, BATCHES.findLastIndex((rows) => rows <= measuredRows));
    draw();
  }

  for (const input of Object.values(sliders)) input.addEventListener("input", draw);
  section.querySelector("button").addEventListener("click", reset);
  section.hidden = false;
  reset();
})();
