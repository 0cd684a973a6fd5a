// The panels of a report: plotly.js draws the numbers of the element #data.
//
// The state of the controls is one object; every change draws the panels in
// sight again, then the others, and printing draws all. It is kept for this tab, so that a page which loads
// itself again looks as before. The controls follow in page.js.
'use strict';

const data = JSON.parse(document.getElementById('data').textContent || '{}');
const root = document.documentElement;
const $ = id => document.getElementById(id);
const COLORS = 10;
const MAX_BANDS = 4;  // lines of a panel that have intervals; more would hide them
const DASHES = ['solid', 'dash', 'dot', 'dashdot', 'longdash'];
const SYMBOLS = ['circle', 'square', 'diamond', 'cross', 'x'];
const AXES = {step: 'step', token: 'tokens', time: 'time'};
const KEY = 'posttrain report ' + location.pathname;
const state = {
  axis: 'step', stage: '', smoothing: 0.6, log: false, theme: 'auto', mean: null,
  paused: false, hiddenRuns: [], hiddenLabels: {}, logs: {}, wide: [],
  open: [], scroll: 0, ...stored(),
};
const visible = new Set();  // figures in sight
const fresh = new Set();  // figures that are drawn as the controls are now

function stored() {
  try {
    return JSON.parse(sessionStorage.getItem(KEY)) || {};
  } catch {
    return {};  // without storage, or of another form
  }
}

function store() {
  try {
    sessionStorage.setItem(KEY, JSON.stringify(state));
  } catch {
    // The page works without it.
  }
}

function style(name) {
  return getComputedStyle(root).getPropertyValue(name).trim();
}

// Names are shown by plotly.js, which reads some HTML and templates in texts.
function escaped(text) {
  return text.replace(/&/g, '&amp;').replace(/</g, '&lt;')
    .replace(/>/g, '&gt;').replace(/%\{/g, '%\u200b{');
}

function faded(color, alpha) {
  const n = parseInt(color.slice(1), 16);
  return `rgba(${n >> 16}, ${(n >> 8) & 255}, ${n & 255}, ${alpha})`;
}

function toggle(list, value) {
  const place = list.indexOf(value);
  if (place < 0) list.push(value);
  else list.splice(place, 1);
}

// --- Numbers -----------------------------------------------------------------

// The places of a line's points on the chosen axis; of one stage alone, they
// begin with it.
function places(line) {
  if (line.x) return line.x;
  const stage = data.runs[line.run].stages[line.stage];
  const x = stage.grids[line.grid][state.axis];
  const start = state.stage ? stage.start[state.axis] : 0;
  const unit = state.axis === 'time' ? seconds().size : 1;
  return x.map(value => value === null ? null : (value - start) / unit);
}

function seconds() {
  const longest = Math.max(0, ...data.runs.flatMap(run => run.stages.flatMap(
    stage => Object.values(stage.grids).flatMap(grid => grid.time.slice(-1)))));
  if (longest > 5400) return {size: 3600, name: 'hours'};
  return longest > 90 ? {size: 60, name: 'minutes'}
    : {size: 1, name: 'seconds'};
}

function plain(value) {
  const size = Math.abs(value);
  return value && (size < 1e-3 || size >= 1e7) ? value.toExponential(4)
    : String(+value.toPrecision(6));
}

// Exponential means, corrected for their start; gaps stay gaps.
function smooth(y, weight) {
  let mean = 0, norm = 0;
  return y.map(value => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return mean / norm;
  });
}

// Whether a line's rows are those of consecutive steps: no line is drawn over
// steps without a measurement.
function isDense(steps) {
  return steps.every((step, i) => !i || step - steps[i - 1] <= 1);
}

// Points without a neighbour have no line, so they get a marker.
function markers(y, size) {
  const known = i => y[i] !== null && y[i] !== undefined;
  return y.map((_, i) => !known(i - 1) && !known(i + 1) ? 5 : size);
}

// --- Traces ------------------------------------------------------------------

function labels(panel) {
  return [...new Set(panel.lines.map(line => line.label))];
}

function look(panel, line) {
  const place = labels(panel).indexOf(line.label);
  return data.runs.length > 1 && !line.x
    ? {color: style(`--c${line.run % COLORS}`), dash: DASHES[place % 5],
      symbol: SYMBOLS[place % 5]}
    : {color: style(`--c${place % COLORS}`),
      dash: DASHES[Math.floor(place / COLORS) % 5],
      symbol: SYMBOLS[Math.floor(place / COLORS) % 5]};
}

function isShown(index, line) {
  const stage = data.runs[line.run].stages[line.stage].name;
  return !state.hiddenRuns.includes(line.run)
    && !(state.hiddenLabels[index] || []).includes(line.label)
    && (!state.stage || state.stage === stage);
}

// The lines that are drawn: those shown, or their means over the runs.
function linesOf(panel, index) {
  const shown = panel.lines.filter(line => isShown(index, line));
  if (!state.mean || panel.kind === 'sum') return shown;
  const groups = new Map();
  for (const line of shown) {
    const name = data.runs[line.run].stages[line.stage].name;
    const key = `${line.label}\n${name}\n${line.grid}`;
    groups.set(key, [...groups.get(key) || [], line]);
  }
  return [...groups.values()].flatMap(
    lines => lines.length > 1 ? [meanOf(lines)] : lines);
}

// The mean of lines, and their range as its band, at the steps that all have.
function meanOf(lines) {
  const points = new Map();
  for (const line of lines) {
    const stage = data.runs[line.run].stages[line.stage];
    const x = places(line);
    stage.grids[line.grid].step.forEach((step, i) => {
      if (line.y[i] === null || x[i] === null) return;
      const own = step - stage.start.step;
      points.set(own, [...points.get(own) || [], [x[i], line.y[i]]]);
    });
  }
  const known = [...points].filter(([, at]) => at.length === lines.length)
    .sort((a, b) => a[0] - b[0]);
  const mean = k => known.map(
    ([, at]) => at.reduce((sum, pair) => sum + pair[k], 0) / at.length);
  const ys = known.map(([, at]) => at.map(pair => pair[1]));
  const start = data.runs[lines[0].run].stages[lines[0].stage].start.step;
  return {...lines[0], x: mean(0), y: mean(1), count: lines.length,
    steps: known.map(([own]) => own + start),
    low: ys.map(y => Math.min(...y)), high: ys.map(y => Math.max(...y))};
}

// The number of lines that are drawn, those of several stages counted once.
function countOf(panel, index) {
  return new Set(linesOf(panel, index)
    .map(line => `${line.x ? '' : line.run} ${line.label}`)).size;
}

// A polygon around each part of the interval without a gap.
function bands(line, x, color) {
  const traces = [];
  let part = [];
  for (let i = 0; i <= x.length; i++) {
    const known = i < x.length && line.low[i] !== null && line.high[i] !== null;
    if (known) part.push(i);
    if (!known && part.length) {
      const back = [...part].reverse();
      traces.push({
        x: [...part, ...back].map(k => x[k]),
        y: [...part.map(k => line.high[k]), ...back.map(k => line.low[k])],
        mode: part.length > 1 ? 'none' : 'lines', fill: 'toself',
        fillcolor: faded(color, 0.14), hoverinfo: 'skip',
        line: {color: faded(color, 0.5), width: 1.5},
      });
      part = [];
    }
  }
  return traces;
}

// The interval of each point, as a bar.
function bars(line, values, color) {
  const size = (bound, sign) => bound.map((b, i) =>
    b === null || values[i] === null ? 0 : Math.max(sign * (b - values[i]), 0));
  return {type: 'data', symmetric: false, array: size(line.high, 1),
    arrayminus: size(line.low, -1), color: faded(color, 0.45),
    thickness: 1.2, width: 3};
}

function traces(panel, index) {
  const below = [], above = [];
  const hasBands = countOf(panel, index) <= MAX_BANDS;
  const percent = panel.kind === 'rate';
  for (const line of linesOf(panel, index)) {
    const {color, dash, symbol} = look(panel, line);
    const x = places(line);
    const stage = data.runs[line.run].stages[line.stage];
    const steps = line.steps || stage.grids[line.grid].step;
    const start = panel.kind === 'sum' && state.stage ? stage.start.token : 0;
    const values = start ? line.y.map(v => v === null ? v : v - start) : line.y;
    const name = [line.x ? `mean of ${line.count} runs`
      : data.runs.length > 1 && data.runs[line.run].name, line.label]
      .filter(Boolean).join(' ') || panel.title;
    const show = value => value === null ? 'n/a'
      : percent ? (100 * value).toFixed(1) + '%' : plain(value);
    const text = steps.map((step, i) => {
      const bounds = line.low
        ? ` [${show(line.low[i])}, ${show(line.high[i])}]` : '';
      const own = Math.round(10 * (step - stage.start.step)) / 10;
      return `${show(values[i])}${bounds} · ${escaped(stage.name)} ${own}`;
    });
    const common = {
      x, type: 'scatter', connectgaps: false, name: escaped(name),
      hovertemplate: `${escaped(name)}: %{text}<extra></extra>`, text,
    };
    const smoothed = line.grid === 'train'
      && !['sum', 'plain'].includes(panel.kind)
      && state.smoothing > 0 && line.y.length > 2;
    // Between two evaluations nothing is measured.
    const joined = line.grid !== 'eval' || isDense(steps);
    const hasInterval = line.low && hasBands;
    if (hasInterval && joined) below.push(...bands(line, x, color));
    if (smoothed) {
      below.push({
        ...common, y: values, mode: 'lines', hoverinfo: 'skip',
        hovertemplate: undefined,
        line: {color: faded(color, 0.28), width: 1},
      });
    }
    const y = smoothed ? smooth(values, state.smoothing) : values;
    const evaluated = line.grid === 'eval';
    above.push({
      ...common, y, mode: joined ? 'lines+markers' : 'markers',
      line: {color, width: 1.8, dash: evaluated ? 'solid' : dash},
      marker: {color, opacity: 1, line: {width: 0}, symbol,
        size: joined ? markers(values, evaluated ? 6 : 0) : 7},
      ...(hasInterval && !joined
        && {error_y: bars(line, values, color)}),
    });
  }
  return [...below, ...above];
}

// --- Layout ------------------------------------------------------------------

// Where the stages after the first begin, of each run that is shown.
function boundaries() {
  if (state.stage) return {shapes: [], annotations: []};
  const shown = data.runs.map((run, i) => [run, i])
    .filter(pair => !state.hiddenRuns.includes(pair[1]));
  const unit = state.axis === 'time' ? seconds().size : 1;
  const end = ([run]) => run.stages.at(-1)?.start[state.axis] || 0;
  const named = [...shown].sort((a, b) => end(b) - end(a))[0];
  const shapes = [], annotations = [];
  shown.forEach(([run, i]) => run.stages.forEach((stage, k) => {
    const x = stage.start[state.axis] / unit;
    if (k) {
      shapes.push({type: 'line', x0: x, x1: x, y0: 0, y1: 1, yref: 'paper',
        layer: 'below', line: {dash: 'dot', width: 1,
          color: shown.length > 1 ? style(`--c${i % COLORS}`)
            : style('--muted')}});
    }
    if (run === named[0] && run.stages.length > 1) {
      annotations.push({x, y: 1, yref: 'paper', xanchor: 'left',
        yanchor: 'bottom', showarrow: false, text: escaped(stage.name),
        font: {size: 10, color: style('--muted')}});
    }
  }));
  return {shapes, annotations};
}

// All panels share the range of x, with space for markers at its ends.
function rangeX() {
  const ends = data.runs.flatMap((run, i) => state.hiddenRuns.includes(i) ? []
    : run.stages.filter(x => !state.stage || x.name === state.stage)
      .flatMap(stage => Object.values(stage.grids)
        .flatMap(grid => [grid[state.axis][0], grid[state.axis].at(-1)])
        .filter(x => x !== null && x !== undefined)
        .map(x => x - (state.stage ? stage.start[state.axis] : 0))));
  const unit = state.axis === 'time' ? seconds().size : 1;
  const low = Math.min(...ends, Infinity) / unit;
  const high = Math.max(...ends, -Infinity) / unit;
  const space = 0.025 * (high - low) || 0.5;
  return ends.length ? [low - space, high + space] : undefined;
}

function axis(more) {
  return {gridcolor: style('--rule'), zeroline: false, automargin: true,
    linecolor: style('--rule'), tickfont: {size: 10, color: style('--muted')},
    ...more};
}

function base() {
  return {
    margin: {l: 40, r: 8, t: 16, b: 30}, showlegend: false,
    paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
    font: {family: 'system-ui, sans-serif', size: 11, color: style('--ink')},
    hoverlabel: {bgcolor: style('--card'), bordercolor: style('--rule'),
      font: {size: 11, color: style('--ink')}, align: 'left'},
    modebar: {bgcolor: 'rgba(0,0,0,0)', color: style('--muted'),
      activecolor: style('--accent')},
    // A finger scrolls the page.
    dragmode: matchMedia('(pointer: coarse)').matches ? false : 'zoom',
  };
}

function layout(panel, index) {
  const logarithmic = isLogarithmic(panel, index);
  const y = logarithmic ? {type: 'log', exponentformat: 'e', nticks: 6}
    : panel.kind === 'rate' ? {tickformat: '.0%', range: [-0.03, 1.03]}
    : {rangemode: panel.kind === 'other' ? 'normal' : 'tozero',
      exponentformat: panel.kind === 'sum' ? 'SI' : 'e'};
  const title = state.axis === 'time' ? seconds().name : AXES[state.axis];
  return {
    ...base(), ...boundaries(), hovermode: 'x unified',
    xaxis: axis({title: {text: title, standoff: 4,
      font: {size: 10, color: style('--muted')}}, showgrid: false,
      exponentformat: 'SI', hoverformat: state.axis === 'time' ? '.2f' : ',.7~g',
      range: rangeX()}),
    yaxis: axis({...y, uirevision: `${panel.key} ${logarithmic}`}),
    // A zoom stays when smoothing changes.
    uirevision: `${state.axis} ${state.stage} ${state.hiddenRuns}`,
  };
}

function isLogarithmic(panel, index) {
  return state.logs[index] ?? (panel.kind === 'log'
    || (state.log && panel.kind !== 'rate'));
}

const CONFIG = {
  displaylogo: false, responsive: true, displayModeBar: 'hover',
  doubleClick: 'reset',
  modeBarButtons: [
    ['toImage', 'zoom2d', 'pan2d', 'zoomIn2d', 'zoomOut2d', 'resetScale2d'],
  ],
  toImageButtonOptions: {format: 'png', scale: 2},
};

// --- Drawing -----------------------------------------------------------------

function draw(figure) {
  if (figure.dataset.panel === undefined) return drawHistogram(figure);
  const index = +figure.dataset.panel, panel = data.panels[index];
  const logarithmic = isLogarithmic(panel, index);
  const shown = linesOf(panel, index);
  const lost = shown.flatMap(line => line.y)
    .filter(y => y !== null && y <= 0).length;
  const notes = [];
  if (logarithmic && lost) notes.push(`${lost} values of 0 or less not shown`);
  if (shown.some(line => line.low) && countOf(panel, index) > MAX_BANDS) {
    notes.push(`intervals from ${MAX_BANDS} lines down: click names to hide lines`);
  }
  if (panel.hidden) notes.push(`${panel.hidden} more lines not drawn`);
  figure.querySelector('.hint').textContent = notes.join('; ');
  figure.querySelector('.log').setAttribute('aria-pressed', logarithmic);
  figure.classList.toggle('is-wide', state.wide.includes(index));
  figure.querySelector('.wide').setAttribute('aria-pressed',
    state.wide.includes(index));
  drawLabels(figure, panel, index);
  return Plotly.react(figure.querySelector('.plot'), traces(panel, index),
    layout(panel, index), CONFIG);
}

function chip(text, color, pressed, act) {
  const button = document.createElement('button');
  button.type = 'button';
  button.setAttribute('aria-pressed', pressed);
  if (color) {
    const dot = document.createElement('span');
    dot.className = `dot ${color}`;
    button.append(dot);
  }
  button.append(text);
  button.addEventListener('click', act);
  return button;
}

function drawLabels(figure, panel, index) {
  const names = labels(panel);
  const marks = panel.lines.some(line => line.grid === 'eval') ? SYMBOLS : DASHES;
  const hidden = state.hiddenLabels[index] ||= [];
  const several = data.runs.length > 1 && !state.mean;
  figure.querySelector('.chips').replaceChildren(...names.map((name, i) =>
    chip(several && names.length > 1 ? `${name} (${marks[i % 5]})` : name,
      several ? '' : `c${i % COLORS}`, !hidden.includes(name), () => {
        toggle(hidden, name);
        draw(figure);
      })).filter(() => names.length > 1 || names[0]));
}

function drawHistogram(figure) {
  const chart = data.histograms[+figure.dataset.histogram];
  const x = chart.binned ? chart.x : chart.x.map(String);
  const colors = chart.bars.map((_, i) => `c${i % COLORS}`);
  figure.querySelector('.chips').replaceChildren(...chart.bars.map((bar, i) =>
    chip(`step ${bar.step} (${bar.count} rollouts)`, colors[i], true,
      () => {})));
  return Plotly.react(figure.querySelector('.plot'), chart.bars.map((bar, i) => ({
    type: 'bar', x, y: bar.y, marker: {color: style(`--${colors[i]}`)},
    name: `step ${bar.step}`,
    hovertemplate: `step ${bar.step}: %{y:.1%}<extra></extra>`,
  })), {
    ...base(), bargap: 0.15, barmode: 'group', hovermode: 'x unified',
    xaxis: axis({type: chart.binned ? 'linear' : 'category', showgrid: false,
      title: {text: 'reward', standoff: 4,
        font: {size: 10, color: style('--muted')}}}),
    yaxis: axis({tickformat: '.0%', rangemode: 'tozero'}),
  }, CONFIG);
}

function show(figure) {
  if (fresh.has(figure)) return;
  fresh.add(figure);
  draw(figure);
}

// Draws the others one by one, those of closed sections when they are opened.
let next;
function drawRest() {
  clearTimeout(next);
  const figure = unseen()[0];
  if (!figure) return;
  show(figure);
  next = setTimeout(drawRest);
}

function unseen() {
  return [...document.querySelectorAll('.card')]
    .filter(figure => figure.offsetParent && !fresh.has(figure));
}

function drawAll() {
  store();
  fresh.clear();
  visible.forEach(show);
  clearTimeout(next);
  next = setTimeout(drawRest);
}

addEventListener('beforeprint', () => unseen().forEach(show));

const observer = new IntersectionObserver(entries => {
  for (const {target, isIntersecting} of entries) {
    if (isIntersecting) {
      visible.add(target);
      show(target);
    } else {
      visible.delete(target);
    }
  }
}, {rootMargin: '400px'});
