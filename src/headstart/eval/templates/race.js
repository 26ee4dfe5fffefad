(() => {
  "use strict";
  const race = document.querySelector(".race");
  const find = (name) => race.querySelector(name);
  const play = find(".race-play"), slider = find(".race-time"), clock = find(".race-clock");
  const speed = find(".race-speed"), chosen = find(".race-prompt");
  const LINGER_MS = {{ linger_ms }}; // how long rejected drafts stay struck through, unless new drafts arrive first
  const HALF_FRAME_MS = 8;
  const prompts = [...race.querySelectorAll("details")].map((details) => {
    const lanes = [...details.querySelectorAll(".race-lane")].map(readLane);
    return { details, lanes, end: Math.max(...lanes.map((lane) => lane.end)) };
  });
  let at = 0, playing = false, last = 0;

  function readLane(element) {
    const steps = [...element.querySelectorAll(".race-text > span")].map((span) => {
      const [drafted, ms, tokens] = span.dataset.t.split(" ").map(Number);
      return { span, drafted, ms, tokens };
    });
    const figures = {};
    for (const figure of element.querySelectorAll("[data-figure]")) figures[figure.dataset.figure] = figure;
    const all = steps.reduce((sum, step) => sum + step.tokens, 0);
    return { element, steps, figures, all, end: steps.at(-1).ms, bar: element.querySelector(".race-track div") };
  }

  function current() {
    return prompts[chosen.selectedIndex];
  }

  function draw() {
    const { lanes, end } = current();
    const rate = Number(speed.value);
    const first = Math.min(...lanes.map((lane) => lane.end));
    for (const lane of lanes) {
      let tokens = 0, done = 0;
      lane.steps.forEach((step, number) => {
        const next = lane.steps[number + 1];
        let state = "wait";
        if (step.ms <= at) {
          tokens += step.tokens;
          done += 1;
          const until = Math.min(step.ms + LINGER_MS * rate, next ? next.drafted : Infinity);
          state = playing && at < until ? "fresh" : "";
        } else if (step.drafted <= at) state = "draft";
        if (step.span.className !== state) step.span.className = state;
      });
      const ms = Math.min(at, lane.end);
      lane.figures.rate.textContent = (ms ? 1000 * tokens / ms : 0).toFixed(1);
      lane.figures.tau.textContent = (done > 1 ? (tokens - 1) / (done - 1) : 1).toFixed(2);
      lane.figures.tokens.textContent = tokens;
      lane.figures.seconds.textContent = (ms / 1000).toFixed(2);
      lane.bar.style.transform = `scaleX(${tokens / lane.all})`;
      lane.element.classList.toggle("won", lane.end === first && at >= first);
    }
    const seconds = (ms) => (ms / 1000).toFixed(2);
    slider.max = end;
    slider.value = at;
    slider.setAttribute("aria-valuetext", `${seconds(at)} of ${seconds(end)} seconds`);
    clock.textContent = `${seconds(at)} / ${seconds(end)} s`;
    play.textContent = playing ? "Pause" : at < end ? "Play" : "Replay";
  }

  function frame(now) {
    if (!playing) return;
    const rate = Number(speed.value), { end } = current();
    at += (now - last) * rate;
    last = now;
    playing = end - at > HALF_FRAME_MS * rate; // show the end in the nearest frame
    if (!playing) at = end;
    draw();
    if (playing) requestAnimationFrame(frame);
  }

  function start() {
    if (at >= current().end) at = 0;
    playing = true;
    last = performance.now();
    draw();
    requestAnimationFrame(frame);
  }

  function show(time) {
    playing = false;
    at = time;
    draw();
  }

  play.addEventListener("click", () => (playing ? show(at) : start()));
  slider.addEventListener("input", () => show(Number(slider.value)));
  chosen.addEventListener("change", () => {
    prompts.forEach(({ details }, number) => (details.open = number === chosen.selectedIndex));
    const moving = playing;
    show(moving ? 0 : current().end);
    if (moving) start();
  });
  race.classList.add("live");
  for (const controls of race.querySelectorAll(".race-controls")) controls.hidden = false;
  show(current().end);
  if (!matchMedia("(prefers-reduced-motion: reduce)").matches && "IntersectionObserver" in window) {
    const seen = new IntersectionObserver((entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      seen.disconnect();
      if (at >= current().end && !playing) start();
    }, { threshold: 0.6 });
    seen.observe(current().details.querySelector(".race-lane"));
  }
})();
