"use strict";
/* The heat map, drawn from the data in the page. Texts become text nodes, never markup: names may come from a stranger. */
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const [EQUAL, WITHIN, OUTSIDE, MISSING, UNEXPECTED, SKIPPED, BLOCKED] = data.key.map((_, place) => place);
  const MARKS = data.key.map((entry) => entry[1]);
  const CLASSES = 6; // colours of classes; their letters go on
  const WIDE = 12; // at most this many columns show numbers in their cells and level names above
  const ROWS = 150; // rows drawn at once: a thousand rows of 64 cells take a browser one second
  const OPEN = 40; // at most this many tensors that match a filter are unfolded
  // from least to most severe
  const WEIGHT = { [EQUAL]: 0, [WITHIN]: 1, [SKIPPED]: 2, [BLOCKED]: 3, [UNEXPECTED]: 4, [MISSING]: 5, [OUTSIDE]: 6 };

  const make = (tag, { text, ...rest } = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(rest)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    node.append(...children);
    return node;
  };
  const letter = (number) => {
    let text = "";
    for (let n = number + 1; n > 0; n = Math.floor((n - 1) / 26)) text = String.fromCharCode(65 + ((n - 1) % 26)) + text;
    return text;
  };
  const whole = (value) => value.toLocaleString("en");
  const small = (value) => (typeof value === "string" ? value : value >= 10 ? value.toPrecision(2).replace("e+", "e") : value.toFixed(2).replace(/^0/, ""));

  /* ---- text of a cell ---- */
  const variantOf = (row, column) => {
    const variants = row[5];
    if (variants === undefined) return [EQUAL];
    const which = row[6] === undefined ? (variants.length === 1 ? 0 : column) : row[6][column];
    return which < 0 ? null : variants[which];
  };
  const ratioRank = (ratio) => (ratio === "nan" ? Infinity : ratio === undefined || ratio === null ? -1 : Number(ratio === "inf" ? 1e308 : ratio));
  const heavier = (a, b) => {
    const [one, two] = [WEIGHT[a[0]], WEIGHT[b[0]]];
    return one !== two ? one > two : ratioRank(a[3]) > ratioRank(b[3]);
  };
  const isBad = (status) => status === OUTSIDE || status === MISSING || status === UNEXPECTED;
  const tint = (variant) => {
    const [status, , , ratio] = variant;
    if (isBad(status)) return "c-outside";
    if (status === BLOCKED) return "c-blocked";
    if (status === SKIPPED) return "c-skipped";
    if (status === EQUAL) return "c-equal";
    return `c-within${Math.min(4, Math.max(1, Math.ceil(ratioRank(ratio) * 4)))}`;
  };
  const say = (variant, names, rule) => {
    if (variant === null) return "not checked";
    const [status, of = 0, word, ratio, maxAbs, ulp, mismatched, bad] = variant;
    const lines = [`${MARKS[status]} ${data.key[status][0]}${word >= 0 ? `: ${data.strings[word]}` : ""}`];
    if (ratio !== undefined && ratio !== null) lines.push(`${ratio > 1 ? whole(ratio) : ratio}× ${rule === "user" ? "user " : ""}tolerance`);
    if (mismatched) lines.push(`${whole(mismatched)} elements differ bitwise`);
    if (maxAbs !== undefined && maxAbs !== null) lines.push(`largest difference ${maxAbs}`);
    if (ulp !== undefined && ulp !== null) lines.push(`${whole(ulp)} ULP at most`);
    if (bad) lines.push(`mismatch on ${bad} of its workers; the worst is shown`);
    lines.push(of < 0 ? "workers of several classes of agreement" : `class of agreement ${letter(of)}`);
    return (names ? [names] : []).concat(lines).join("\n");
  };

  /* ---- tensors grouped by decoder layer ---- */
  const blockOf = (layer) => (/^(?:.*?\.)?\d+(?=\.|$)/.exec(layer) || [layer])[0];
  const isUnlike = (row) => {
    if (row[5] === undefined) return false;
    const shown = new Set(row[5].map((variant) => variant[1] || 0));
    return shown.size > 1 || row[5].some((variant) => variant[0] !== EQUAL && variant[0] !== WITHIN);
  };
  const words = (row) => {
    const parts = row.slice(0, 5).map((place) => data.strings[place]);
    const found = [`${parts[0]}.${parts[1]}`, ...parts.slice(2)];
    for (const variant of row[5] || []) {
      found.push(data.key[variant[0]][0]);
      if (variant[2] >= 0) found.push(data.strings[variant[2]]);
    }
    return found.join(" ").toLowerCase();
  };
  const blocksOf = (rows) => {
    const blocks = new Map();
    for (const row of rows) {
      const name = blockOf(data.strings[row[0]]);
      if (!blocks.has(name)) blocks.set(name, []);
      blocks.get(name).push(row);
    }
    return blocks;
  };

  /* ---- state ---- */
  const asked = { text: "", unlike: false, by: "ratio" };
  const matches = (row) => {
    if (asked.unlike && !isUnlike(row)) return false;
    if (!asked.text) return true;
    const found = words(row);
    return asked.text.split(/\s+/).every((word) => found.includes(word));
  };

  class Grid {
    constructor(section) {
      this.section = section;
      this.columns = data.columns[section.loadPath];
      this.open = new Map();
      this.limit = ROWS;
      this.title = make("b");
      this.summary = make("span", { class: "quiet" });
      this.window = make("div", { class: "window" });
      this.box = make("details", { class: "stage" }, make("summary", {}, this.title, this.summary), this.window);
      const loadPath = Object.keys(data.columns).length > 1 ? ` · load path ${section.loadPath}` : "";
      this.title.textContent = section.stage + loadPath;
      this.box.addEventListener("toggle", () => this.box.open && !this.drawn && this.draw());
    }
    filter() {
      this.rows = this.section.rows.filter(matches);
      const { total, bad, unlike, leftOut } = this.section;
      const parts = [`${total} tensor${total === 1 ? "" : "s"}`];
      parts.push(bad ? `${MARKS[OUTSIDE]} mismatch in ${bad}` : unlike ? `${unlike} not bitwise equal everywhere` : "bitwise equal everywhere");
      if (leftOut) parts.push(`${leftOut} not shown: see report.json`);
      if (this.rows.length !== this.section.rows.length) parts.push(`${this.rows.length} match`);
      this.summary.textContent = parts.join(" · ");
      this.box.hidden = !this.rows.length && this.section.rows.length > 0;
      this.limit = ROWS;
      this.drawn = false;
      if (this.box.open) this.draw();
      return this.rows.length;
    }
    draw() {
      this.drawn = true;
      const wide = this.columns.length <= WIDE;
      const head = make("tr", {}, make("th", { scope: "col", text: "layer" }));
      for (const [label] of this.columns) {
        head.append(make("th", { scope: "col", title: label, ...(wide ? {} : { class: "turned" }) }, make("span", { text: label })));
      }
      const body = make("tbody");
      const searching = (asked.text || asked.unlike) && this.rows.length <= OPEN;
      this.shown = [];
      for (const [name, rows] of blocksOf(this.rows)) {
        const single = rows.length === 1;
        const open = !single && (this.open.get(name) ?? searching);
        this.shown.push({ name, rows, block: !single, open });
        if (open) for (const row of rows) this.shown.push({ name, rows: [row], part: true });
      }
      for (const line of this.shown.slice(0, this.limit)) body.append(this.line(line, wide));
      const label = `${this.section.stage}: layers and devices. Arrow keys move, Enter unfolds a layer.`;
      this.table = make("table", { class: "grid", role: "treegrid", "aria-label": label, "aria-rowcount": this.shown.length + 1 }, make("thead", {}, head), body);
      this.window.replaceChildren(this.table);
      const rest = this.shown.length - this.limit;
      if (rest > 0) {
        const more = make("button", { type: "button", text: `show ${Math.min(rest, ROWS)} of ${rest} more lines` });
        more.addEventListener("click", () => {
          const at = this.limit;
          this.limit += ROWS;
          this.draw();
          this.focus(at, 0);
        });
        this.window.append(make("div", { class: "more" }, more));
      }
      this.table.addEventListener("keydown", (event) => this.key(event));
      this.table.addEventListener("click", (event) => this.click(event));
      this.rove(0, Math.min(1, this.columns.length));
    }
    line({ name, rows, block, open, part }, wide) {
      const strings = rows.length === 1 ? rows[0].slice(0, 5).map((place) => data.strings[place]) : null;
      const full = strings ? `${strings[0]}.${strings[1]}` : name;
      const text = part && full.startsWith(`${name}.`) ? full.slice(name.length + 1) : full;
      const title = strings ? `${full}\n${strings[2]} ${strings[3]}, rule ${strings[4]}` : `${full}: ${rows.length} tensors`;
      const head = make("th", { scope: "row", tabindex: "-1", title, role: "rowheader" });
      if (block) head.append(make("span", { class: "fold", "aria-hidden": "true", text: open ? "▾" : "▸" }));
      head.append(text);
      if (block) head.append(make("span", { class: "quiet", text: ` ${rows.length}` }));
      const tr = make("tr", { class: block ? "block" : part ? "part" : "one", role: "row", "aria-level": part ? 2 : 1 }, head);
      if (block) tr.setAttribute("aria-expanded", String(open));
      this.columns.forEach(([label, many], column) => tr.append(this.cell(rows, column, full, label, many, wide)));
      return tr;
    }
    cell(rows, column, full, label, many, wide) {
      let worst = null;
      let mixed = false;
      let off = 0;
      for (const row of rows) {
        const variant = variantOf(row, column);
        if (variant === null) continue;
        if (worst !== null && (variant[1] || 0) !== (worst[1] || 0)) mixed = true;
        if (isBad(variant[0])) off += 1;
        if (worst === null || heavier(variant, worst)) worst = variant;
      }
      const td = make("td", { tabindex: "-1", role: "gridcell" });
      const who = `${full} on ${label}${many > 1 ? ` (${many} workers)` : ""}`;
      let told = say(worst, who, rows.length === 1 ? data.strings[rows[0][4]] : "");
      if (rows.length > 1) {
        told += off ? `\nmismatch in ${off} of ${rows.length} tensors; the worst is shown` : `\nthe largest of ${rows.length} tensors`;
      }
      td.dataset.told = told;
      td.setAttribute("aria-label", told.replaceAll("\n", ", "));
      if (worst === null) {
        td.className = "none";
        td.textContent = "·";
      } else if (asked.by === "class") {
        const of = worst[1] || 0;
        td.className = mixed || of < 0 ? "class-mixed" : `class-${of === 0 ? 0 : ((of - 1) % CLASSES) + 1}`;
        td.textContent = mixed || of < 0 ? "∗" : letter(of);
      } else {
        td.className = tint(worst);
        const ratio = worst[3];
        const amount = wide && worst[0] !== EQUAL && ratio !== undefined && ratio !== null ? ` ${small(ratio)}` : "";
        td.textContent = MARKS[worst[0]] + (wide && rows.length > 1 && off ? ` ${off}/${rows.length}` : amount);
      }
      return td;
    }

    /* ---- keyboard: one cell of the table is a tab stop, arrows move it ---- */
    at(row, column) {
      const line = this.table.tBodies[0].rows[row];
      return line && line.cells[column];
    }
    rove(row, column) {
      const cell = this.at(row, column);
      if (!cell) return null;
      if (this.stop) this.stop.tabIndex = -1;
      this.stop = cell;
      cell.tabIndex = 0;
      return cell;
    }
    focus(row, column) {
      const cell = this.rove(row, column);
      if (cell) cell.focus();
    }
    place(cell) {
      return [cell.parentNode.rowIndex - 1, cell.cellIndex];
    }
    toggle(row) {
      const line = this.shown[row];
      if (!line || !line.block) return false;
      this.open.set(line.name, !line.open);
      const [top, left] = [this.window.scrollTop, this.window.scrollLeft];
      this.draw();
      this.window.scrollTo(left, top);
      return true;
    }
    key(event) {
      const cell = event.target.closest("td, tbody th");
      if (!cell || event.altKey || event.metaKey) return;
      const [row, column] = this.place(cell);
      const rows = this.table.tBodies[0].rows.length - 1;
      const last = this.columns.length;
      const to = {
        ArrowUp: [Math.max(0, row - 1), column],
        ArrowDown: [Math.min(rows, row + 1), column],
        ArrowLeft: [row, Math.max(0, column - 1)],
        ArrowRight: [row, Math.min(last, column + 1)],
        Home: [event.ctrlKey ? 0 : row, 0],
        End: [event.ctrlKey ? rows : row, last],
        PageUp: [Math.max(0, row - 10), column],
        PageDown: [Math.min(rows, row + 10), column],
      }[event.key];
      if (to) {
        event.preventDefault();
        this.focus(...to);
      } else if ((event.key === "Enter" || event.key === " ") && this.toggle(row)) {
        event.preventDefault();
        this.focus(row, column);
      } else if (event.key === "Escape") {
        hide();
      }
    }
    click(event) {
      const cell = event.target.closest("td, tbody th");
      if (!cell) return;
      const [row, column] = this.place(cell);
      if (column === 0) this.toggle(row);
      this.focus(row, column);
    }
  }

  /* ---- tooltip of the pointed or focused cell; a screen reader gets the same text as the cell's label ---- */
  const tip = $("tip");
  let told = null;
  const hide = () => {
    told = null;
    tip.hidden = true;
  };
  const show = (cell) => {
    if (!cell.dataset.told) return hide();
    told = cell;
    tip.textContent = cell.dataset.told;
    tip.hidden = false;
    const box = cell.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = tip;
    const below = box.bottom + 6 + height < innerHeight;
    tip.style.left = `${Math.max(6, Math.min(box.left, innerWidth - width - 6))}px`;
    tip.style.top = `${below ? box.bottom + 6 : Math.max(6, box.top - height - 6)}px`;
  };
  const host = $("sections");
  tip.setAttribute("aria-hidden", "true");
  host.addEventListener("mouseover", (event) => {
    const cell = event.target.closest("td");
    if (cell) show(cell);
    else hide();
  });
  host.addEventListener("mouseleave", hide);
  host.addEventListener("focusin", (event) => show(event.target));
  host.addEventListener("focusout", hide);
  addEventListener("scroll", () => told && show(told), { capture: true, passive: true }); // an arrow key scrolls too

  /* ---- key to the colours ---- */
  const key = () => {
    const entry = (kind, mark, text) => make("span", {}, make("span", { class: `swatch ${kind}`, text: mark }), text);
    const parts = asked.by === "class"
      ? [entry("class-0", "A", "bitwise equal to the reference worker"), entry("class-1", "B", "different; C, D … further classes"), entry("class-mixed", "∗", "a layer with tensors of several classes")]
      : [entry("c-equal", "=", "bitwise equal"), entry("c-within1", "≤", "up to ¼ of the tolerance"), entry("c-within2", "≤", "up to ½"), entry("c-within3", "≤", "up to ¾"), entry("c-within4", "≤", "up to all of it"), entry("c-outside", "✗", "mismatch (? missing, + unexpected)"), entry("c-skipped", "–", "skipped"), entry("c-blocked", "!", "could not be checked")];
    $("key").replaceChildren(...parts);
  };

  /* ---- start ---- */
  const grids = data.sections.map((section) => new Grid(section));
  host.append(...grids.map((grid) => grid.box));
  const apply = () => {
    let matched = 0;
    for (const grid of grids) matched += grid.filter();
    const all = data.sections.reduce((sum, section) => sum + section.rows.length, 0);
    $("count").textContent = matched === all ? `${all} tensors` : `${matched} of ${all} tensors match`;
    hide();
  };
  let waiting = 0;
  $("filter").addEventListener("input", (event) => {
    asked.text = event.target.value.trim().toLowerCase();
    clearTimeout(waiting);
    waiting = setTimeout(apply, 120); // drawing a large table must not block typing
  });
  $("unlike").addEventListener("change", (event) => {
    asked.unlike = event.target.checked;
    apply();
  });
  for (const radio of document.querySelectorAll("input[name=by]")) {
    radio.addEventListener("change", () => {
      asked.by = document.querySelector("input[name=by]:checked").value;
      key();
      apply();
    });
  }
  asked.unlike = $("unlike").checked; // a browser that goes back restores the form
  asked.text = $("filter").value.trim().toLowerCase();
  asked.by = document.querySelector("input[name=by]:checked").value;
  key();
  apply();
  const first = grids.find((grid) => grid.section.bad) || grids.find((grid) => grid.section.unlike) || grids[0];
  if (first) {
    first.box.open = true;
    first.draw(); // now: the toggle event comes only after the first paint
  }
  $("controls").hidden = $("key").hidden = false;

  /* ---- colour scheme: the system's, until the reader chooses ---- */
  const button = $("scheme");
  const choices = ["system", "light", "dark"];
  let choice = 0;
  button.addEventListener("click", () => {
    choice = (choice + 1) % choices.length;
    document.documentElement.dataset.scheme = choices[choice];
    button.textContent = `Scheme: ${choices[choice]}`;
  });
  button.hidden = false;
})();
