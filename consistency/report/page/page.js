"use strict";
/* The table of layers by architecture, drawn from the data in the page. Texts become text nodes, never markup: names
   may come from a stranger. */
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const [EQUAL, WITHIN, OUTSIDE, MISSING, UNEXPECTED, SKIPPED, BLOCKED] = data.key.map((_, place) => place);
  const MARKS = data.key.map((entry) => entry[1]);
  const CLASSES = 6; // colours of classes; their letters go on
  const WIDE = 12; // at most this many workers' columns show numbers in their cells and level names above
  const FAULTY = 4; // at most this many workers of an architecture have a column before it is unfolded
  const SHEET = 5; // at most this many columns fit the width of a printed page
  const AGREE = -1;
  const ROWS = 150; // rows drawn at once: a thousand rows of 64 cells take a browser one second
  const OPEN = 40; // at most this many tensors that match a filter are unfolded
  // from least to most severe; what was skipped on one device hides no figure of another
  const WEIGHT = { [SKIPPED]: -1, [EQUAL]: 0, [WITHIN]: 1, [BLOCKED]: 2, [UNEXPECTED]: 3, [MISSING]: 4, [OUTSIDE]: 5 };

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
  const elements = (count) => (count === 1 ? "1 element differs" : `${whole(count)} elements differ`);
  const small = (value) => (typeof value === "string" ? value : value >= 10 ? value.toPrecision(2).replace("e+", "e") : value.toFixed(2).replace(/^0/, ""));

  /* ---- text of a cell ---- */
  const cellOf = (row, architecture) => (row[5] === undefined ? [EQUAL] : row[5][architecture]);
  const variantOf = (row, column) => {
    const variants = row[6];
    if (variants === undefined) return [EQUAL];
    const which = row[7] === undefined ? (variants.length === 1 ? 0 : column) : row[7][column];
    return which < 0 ? null : variants[which];
  };
  const ratioRank = (ratio) => (ratio === "nan" ? Infinity : ratio === undefined || ratio === null ? -1 : Number(ratio === "inf" ? 1e308 : ratio));
  const heavier = (a, b) => {
    const [one, two] = [WEIGHT[a[0]], WEIGHT[b[0]]];
    return one !== two ? one > two : ratioRank(a[3]) > ratioRank(b[3]);
  };
  const badness = (cell) => [WEIGHT[cell[0]], ratioRank(cell[1])];
  const isWorse = (one, two) => (one[0] !== two[0] ? one[0] > two[0] : one[1] > two[1]);
  const isBad = (status) => status === OUTSIDE || status === MISSING || status === UNEXPECTED;
  const tint = (status, ratio) => {
    if (isBad(status)) return "c-outside";
    if (status === BLOCKED) return "c-blocked";
    if (status === SKIPPED) return "c-skipped";
    if (status === EQUAL) return "c-equal";
    return `c-within${Math.min(4, Math.max(1, Math.ceil(ratioRank(ratio) * 4)))}`;
  };
  const say = (variant, names, rule) => {
    if (variant === null) return `${names}\nnot checked`;
    const [status, of = 0, word, ratio, maxAbs, ulp, mismatched, bad] = variant;
    const lines = [`${MARKS[status]} ${data.key[status][0]}${word >= 0 ? `: ${data.strings[word]}` : ""}`];
    if (ratio !== undefined && ratio !== null) lines.push(`${ratio > 1 ? whole(ratio) : ratio}× ${rule === "user" ? "user " : ""}tolerance`);
    if (mismatched) lines.push(`${elements(mismatched)} bitwise`);
    if (maxAbs !== undefined && maxAbs !== null) lines.push(`largest difference ${maxAbs}`);
    if (ulp !== undefined && ulp !== null) lines.push(`${whole(ulp)} ULP at most`);
    if (bad) lines.push(`mismatch on ${bad} of its workers; the worst is shown`);
    lines.push(of < 0 ? "workers of several classes of agreement" : `class of agreement ${letter(of)}`);
    return [names, ...lines].join("\n");
  };
  const agreement = (cell) => (cell[3] === undefined ? "" : cell[3] === AGREE ? "≡" : "≢");
  const sayCell = (cell, worst, names, rule) => {
    if (cell === null || worst === null) return `${names}\nnot checked`;
    const [status, , figures, devices] = cell;
    const word = worst[0] === status && worst[2] >= 0 ? `: ${data.strings[worst[2]]}` : "";
    const lines = [`${MARKS[status]} ${data.key[status][0]}${word}`];
    if (figures) lines.push(`largest |difference| / allowed${rule === "user" ? " by the user" : ""}, ratio, ULP:`, figures);
    if (worst[6]) lines.push(`${elements(worst[6])} bitwise on the worst device`);
    if (devices === AGREE) lines.push("≡ its devices are bitwise equal");
    else if (devices !== undefined) lines.push(`≢ its devices differ: ${data.strings[devices]}`);
    return [names, ...lines].join("\n");
  };

  const nameOf = (row) => `${data.strings[row[0]]}.${data.strings[row[1]]}`;
  const ofSeveral = (rows, off, shown) => {
    const many = off ? `mismatch in ${off} of ${rows.length} tensors; the worst is shown` : `the largest of ${rows.length} tensors`;
    return `\n${many}${shown === null ? "" : `: ${nameOf(shown)}`}`;
  };

  /* ---- tensors grouped by decoder layer ---- */
  const blockOf = (layer) => (/^(?:.*?\.)?\d+(?=\.|$)/.exec(layer) || [layer])[0];
  const isUnlike = (row) => {
    if (row[6] === undefined) return false;
    const shown = new Set(row[6].map((variant) => variant[1] || 0));
    return shown.size > 1 || row[6].some((variant) => variant[0] !== EQUAL && variant[0] !== WITHIN);
  };
  const hasMismatch = (row) => (row[5] || []).some((cell) => cell !== null && isBad(cell[0]));
  const words = (row) => {
    const parts = row.slice(0, 5).map((place) => data.strings[place]);
    const found = [`${parts[0]}.${parts[1]}`, ...parts.slice(2)];
    for (const variant of row[6] || []) {
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
  const asked = { text: "", unlike: false, worst: true, by: "ratio" };
  const matches = (row) => {
    if (asked.unlike && !isUnlike(row)) return false;
    if (!asked.text) return true;
    const found = words(row);
    return asked.text.split(/\s+/).every((word) => found.includes(word));
  };

  const worstOf = (rows, architectures) =>
    rows.reduce((worst, row) => {
      for (let place = 0; place < architectures; place += 1) {
        const cell = cellOf(row, place);
        if (cell !== null && isWorse(badness(cell), worst.badness)) worst = { badness: badness(cell), row };
      }
      return worst;
    }, { badness: [-2, -1], row: rows[0] });
  const narrow = matchMedia("(max-width: 40rem)");

  class Grid {
    constructor(section) {
      this.section = section;
      this.columns = data.columns[section.load_path];
      this.groups = this.ranked();
      this.open = new Map();
      this.limit = ROWS;
      this.printing = false;
      this.title = make("b");
      this.summary = make("span", { class: "quiet" });
      this.window = make("div", { class: "window" });
      this.box = make("details", { class: "stage" }, make("summary", {}, this.title, this.summary), this.window);
      const loadPath = Object.keys(data.columns).length > 1 ? ` · load path ${section.load_path}` : "";
      this.title.textContent = section.stage + loadPath;
      this.box.addEventListener("toggle", () => this.box.open && !this.drawn && this.draw());
    }
    /* Architectures with their workers' columns, of both the faulty ones first: of the others none need be seen. */
    ranked() {
      const groups = data.architectures[this.section.load_path].map(([name, devices], place) => ({ name, devices, place, workers: 0, bad: 0, columns: [], open: false }));
      const byName = new Map(groups.map((group) => [group.name, group]));
      const places = this.columns.map(([label, many, name], place) => {
        const group = byName.get(name);
        const column = { label, many, place, bad: 0, apart: 0 };
        group.columns.push(column);
        group.workers += many;
        return column;
      });
      for (const row of this.section.rows) {
        if (row[6] === undefined) continue;
        for (const group of groups) {
          const cell = row[5][group.place];
          if (cell === null) continue;
          const apart = cell[3] !== undefined && cell[3] !== AGREE;
          if (isBad(cell[0])) group.bad += 1;
          if (!apart && !isBad(cell[0])) continue;
          const sizes = new Map();
          const found = group.columns.map(({ place }) => variantOf(row, place));
          for (const variant of found) if (variant) sizes.set(variant[1] || 0, (sizes.get(variant[1] || 0) || 0) + 1);
          const most = Math.max(...sizes.values());
          found.forEach((variant, at) => {
            if (variant === null) return;
            const { place } = group.columns[at];
            if (isBad(variant[0])) places[place].bad += 1;
            if (apart && sizes.get(variant[1] || 0) < most) places[place].apart += 1;
          });
        }
      }
      for (const group of groups) group.columns.sort((a, b) => b.bad - a.bad || b.apart - a.apart || a.place - b.place);
      return groups.sort((a, b) => b.bad - a.bad || a.place - b.place);
    }
    filter() {
      this.rows = this.section.rows.filter(matches);
      const { total, bad, unchecked, unlike, checks, left_out } = this.section;
      const parts = [`${total} ${checks ? "check" : "tensor"}${total === 1 ? "" : "s"}`];
      if (bad) parts.push(`${MARKS[OUTSIDE]} mismatch in ${bad}`);
      else if (unlike && !checks) parts.push(`${unlike} not bitwise equal everywhere`);
      else if (unchecked < total) parts.push(checks ? "within their limits" : "bitwise equal everywhere");
      if (unchecked) parts.push(`${unchecked} skipped or not reached`);
      if (left_out) parts.push(`${left_out} not shown: see report.json`);
      if (this.rows.length !== this.section.rows.length) parts.push(`${this.rows.length} match`);
      this.summary.textContent = parts.join(" · ");
      this.box.hidden = !this.rows.length && this.section.rows.length > 0;
      this.limit = ROWS;
      this.drawn = false;
      if (this.box.open) this.draw();
      return this.rows.length;
    }
    /* What has a column: each architecture, and below it the workers that are unfolded or faulty. */
    laidOut() {
      const found = [];
      for (const group of this.groups) {
        found.push({ group });
        if (group.columns.length < 2) continue;
        const faulty = group.columns.filter(({ bad, apart }) => bad || apart).slice(0, FAULTY);
        for (const column of group.open && !this.printing ? group.columns : faulty) found.push({ group, column });
      }
      return found;
    }
    head(wide) {
      const head = make("tr", { role: "row" }, make("th", { scope: "col", role: "columnheader", text: "layer" }));
      for (const { group, column } of this.cells) {
        if (column) {
          head.append(make("th", { scope: "col", role: "columnheader", class: wide ? "device" : "device turned" }, make("span", { text: column.label })));
          continue;
        }
        const devices = group.workers > this.columns.length ? `${whole(group.workers)} workers` : group.devices;
        const cell = make("th", { scope: "col", role: "columnheader", class: group.bad ? "architecture bad" : "architecture" });
        const name = group.name || "other workers";
        if (group.columns.length < 2) {
          cell.append(make("b", { text: name }), make("span", { class: "devices", text: devices }));
        } else {
          const button = make("button", { type: "button", class: "unfold", "aria-expanded": String(group.open) }, make("span", { class: "fold", "aria-hidden": "true", text: group.open ? "▾" : "▸" }), make("b", { text: name }), make("span", { class: "devices", text: devices }));
          button.addEventListener("click", () => {
            group.open = !group.open;
            this.redraw();
            this.table.querySelectorAll("thead .architecture")[this.groups.indexOf(group)].firstChild.focus();
          });
          cell.append(button);
        }
        head.append(cell);
      }
      return head;
    }
    draw() {
      this.drawn = true;
      this.cells = this.laidOut();
      const wide = this.cells.filter(({ column }) => column).length <= WIDE;
      const body = make("tbody");
      const searching = (asked.text || asked.unlike) && this.rows.length <= OPEN;
      let blocks = [...blocksOf(this.rows)].map(([name, rows]) => ({ name, rows, worst: worstOf(rows, this.groups.length) }));
      if (asked.worst) blocks = blocks.sort((a, b) => (isWorse(a.worst.badness, b.worst.badness) ? -1 : isWorse(b.worst.badness, a.worst.badness) ? 1 : 0));
      this.shown = [];
      for (const { name, rows, worst } of blocks) {
        const single = rows.length === 1;
        const parts = this.printing ? rows.filter(hasMismatch) : rows; // on paper nothing can be unfolded
        const open = !single && (this.printing ? parts.length > 0 : this.open.get(name) ?? searching);
        this.shown.push({ name, rows, worst, block: !single, open });
        if (open) for (const row of parts) this.shown.push({ name, rows: [row], part: true });
      }
      for (const line of this.shown.slice(0, this.limit)) body.append(this.line(line, wide));
      const label = `${this.section.stage}: layers by architecture. Arrow keys move, Enter unfolds a layer.`;
      this.table = make("table", { class: "grid", role: "treegrid", "aria-label": label, "aria-rowcount": this.shown.length + 1 }, make("thead", { role: "rowgroup" }, this.head(wide)), body);
      body.setAttribute("role", "rowgroup");
      this.stack();
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
      this.rove(0, Math.min(1, this.cells.length));
    }
    redraw() {
      const [top, left] = [this.window.scrollTop, this.window.scrollLeft];
      this.draw();
      this.window.scrollTo(left, top);
    }
    /* Where columns do not fit, each cell has a line, and names its column. */
    stack() {
      if (this.table) this.table.classList.toggle("stacked", narrow.matches || (this.printing && this.cells.length > SHEET));
    }
    print(starts) {
      if (!this.section.bad) return;
      if (starts) this.wasOpen = this.box.open;
      this.printing = starts;
      this.box.open = starts || this.wasOpen;
      if (this.box.open) this.redraw();
    }
    line({ name, rows, worst, block, open, part }, wide) {
      const strings = rows.length === 1 ? rows[0].slice(0, 5).map((place) => data.strings[place]) : null;
      const full = strings ? `${strings[0]}.${strings[1]}` : name;
      const within = (text) => (text.startsWith(`${name}.`) ? text.slice(name.length + 1) : text);
      const text = part ? within(full) : full;
      const title = strings ? `${full}\n${strings[2]} ${strings[3]}, rule ${strings[4]}` : `${full}: ${rows.length} tensors`;
      const head = make("th", { scope: "row", tabindex: "-1", title, role: "rowheader" });
      if (block) head.append(make("span", { class: "fold", "aria-hidden": "true", text: open ? "▾" : "▸" }));
      head.append(text);
      if (block) head.append(make("span", { class: "quiet", text: ` ${rows.length}` }));
      if (block && worst.badness[0] > WEIGHT[EQUAL]) {
        head.append(make("span", { class: "worst", text: ` worst ${within(nameOf(worst.row))}` }));
      }
      const tr = make("tr", { class: block ? "block" : part ? "part" : "one", role: "row", "aria-level": part ? 2 : 1 }, head);
      if (block) tr.setAttribute("aria-expanded", String(open));
      for (const shown of this.cells) tr.append(shown.column ? this.device(rows, shown, full, wide) : this.cell(rows, shown.group, full, worst && worst.row));
      return tr;
    }
    /* What an architecture saw of a tensor, or of the worst one of a block. */
    cell(rows, group, full, header) {
      let cell = null;
      let worst = null;
      let shown = null; // the row that the figures are of
      let off = 0;
      let apart = 0;
      const classes = new Set();
      for (const row of rows) {
        const found = cellOf(row, group.place);
        if (found === null) continue;
        if (isBad(found[0])) off += 1;
        if (agreement(found) === "≢") apart += 1;
        if (asked.by === "class") for (const { place } of group.columns) classes.add((variantOf(row, place) || [0, 0])[1] || 0);
        const named = row === header && !(cell !== null && isWorse(badness(cell), badness(found)));
        if (cell !== null && !named && !isWorse(badness(found), badness(cell))) continue;
        [cell, shown] = [found, row];
        worst = null;
        for (const { place } of group.columns) {
          const variant = variantOf(row, place);
          if (variant !== null && (worst === null || heavier(variant, worst))) worst = variant;
        }
      }
      const many = group.workers > 1 ? ` (${group.workers} workers)` : "";
      const name = group.name || "other workers";
      let told = sayCell(cell, worst, `${full} on ${name}${many}`, rows.length === 1 ? data.strings[rows[0][4]] : "");
      if (rows.length > 1) {
        told += ofSeveral(rows, off, shown);
        if (apart) told += `\n≢ its devices differ in ${apart} of ${rows.length} tensors`;
      }
      const td = this.td(told, name);
      td.classList.add("architecture");
      if (cell === null) {
        td.classList.add("none");
        td.append("·");
      } else if (asked.by === "class") {
        this.byClass(td, [...classes]);
      } else {
        td.classList.add(tint(cell[0], cell[1]));
        const [first, ...more] = (cell[2] || MARKS[cell[0]]).split("  ");
        td.append(make("span", { class: "figure", text: first }));
        if (more.length && /^([\d.]+(e[+-]\d+)?|nan|inf)$/.test(more[0])) more[0] += "×";
        const sign = rows.length > 1 && apart ? `≢ ${apart}/${rows.length}` : agreement(cell);
        if (rows.length > 1 && off) more.push(`${MARKS[OUTSIDE]} ${off}/${rows.length}`);
        if (sign) more.push(sign);
        if (header && shown !== header && cell[2]) more.push(nameOf(shown).replace(`${full}.`, "")); // else the line names it
        if (more.length) td.append(" ", make("span", { class: "beside", text: more.join("  ") }));
      }
      return td;
    }
    /* The same of one worker, or of a line of several. */
    device(rows, { column }, full, wide) {
      const { label, many, place } = column;
      let worst = null;
      let shown = null;
      let off = 0;
      const classes = new Set();
      for (const row of rows) {
        const variant = variantOf(row, place);
        if (variant === null) continue;
        classes.add(variant[1] || 0);
        if (isBad(variant[0])) off += 1;
        if (worst === null || heavier(variant, worst)) [worst, shown] = [variant, row];
      }
      const who = `${full} on ${label}${many > 1 ? ` (${many} workers)` : ""}`;
      let told = say(worst, who, rows.length === 1 ? data.strings[rows[0][4]] : "");
      if (rows.length > 1) told += ofSeveral(rows, off, shown);
      const td = this.td(told, label);
      td.classList.add("device");
      if (worst === null) {
        td.classList.add("none");
        td.append("·");
      } else if (asked.by === "class") {
        this.byClass(td, [...classes]);
      } else {
        td.classList.add(tint(worst[0], worst[3]));
        const ratio = worst[3];
        const amount = wide && worst[0] !== EQUAL && ratio !== undefined && ratio !== null ? ` ${small(ratio)}` : "";
        td.append(MARKS[worst[0]] + (wide && rows.length > 1 && off ? ` ${off}/${rows.length}` : amount));
      }
      return td;
    }
    td(told, name) {
      const td = make("td", { tabindex: "-1", role: "gridcell", "aria-label": told.replaceAll("\n", ", ") });
      td.dataset.told = told;
      td.dataset.column = name;
      return td;
    }
    byClass(td, classes) {
      const of = classes.length === 1 ? classes[0] : -1;
      td.classList.add(of < 0 ? "class-mixed" : `class-${of === 0 ? 0 : ((of - 1) % CLASSES) + 1}`);
      td.append(of < 0 ? "∗" : letter(of));
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
      this.redraw();
      return true;
    }
    key(event) {
      const cell = event.target.closest("td, tbody th");
      if (!cell || event.altKey || event.metaKey) return;
      const [row, column] = this.place(cell);
      const rows = this.table.tBodies[0].rows.length - 1;
      const last = this.cells.length;
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
      : [entry("c-equal", "=", "bitwise equal"), entry("c-within1", "≤", "up to ¼ of the tolerance"), entry("c-within2", "≤", "up to ½"), entry("c-within3", "≤", "up to ¾"), entry("c-within4", "≤", "up to all of it"), entry("c-outside", "✗", "mismatch (? missing, + unexpected)"), entry("c-skipped", "–", "skipped"), entry("c-blocked", "!", "could not be checked"), make("span", { text: "≡ devices of the architecture are bitwise equal, ≢ they differ; 1/4: in one of four tensors" })];
    $("key").replaceChildren(...parts);
  };

  /* ---- start ---- */
  const grids = data.sections.map((section) => new Grid(section));
  grids.sort((a, b) => (b.section.bad > 0) - (a.section.bad > 0)); // stages with a mismatch first, each in its order
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
  for (const name of ["unlike", "worst"]) {
    $(name).addEventListener("change", (event) => {
      asked[name] = event.target.checked;
      apply();
    });
  }
  for (const radio of document.querySelectorAll("input[name=by]")) {
    radio.addEventListener("change", () => {
      asked.by = document.querySelector("input[name=by]:checked").value;
      key();
      apply();
    });
  }
  asked.worst = $("worst").checked;
  asked.unlike = $("unlike").checked; // a browser that goes back restores the form
  asked.text = $("filter").value.trim().toLowerCase();
  asked.by = document.querySelector("input[name=by]:checked").value;
  key();
  apply();
  // of a model before copies, which have a table of their own, and operators, of which each differs between devices
  const ofModel = (grid) => grid.section.stage !== "transfer" && grid.section.stage !== "operators";
  const [bad, unlike] = ["bad", "unlike"].map((name) => grids.filter((grid) => grid.section[name]));
  const first = [...bad.filter(ofModel), ...bad, ...unlike.filter(ofModel), ...unlike, ...grids][0];
  if (first) {
    first.box.open = true;
    first.draw(); // now: the toggle event comes only after the first paint
  }
  $("controls").hidden = $("key").hidden = false;
  narrow.addEventListener("change", () => grids.forEach((grid) => grid.stack()));

  /* ---- on paper what is red is open ---- */
  let closed = [];
  addEventListener("beforeprint", () => {
    for (const grid of grids) grid.print(true);
    closed = [...document.querySelectorAll(".findings .s-error details:not([open])")];
    for (const box of closed) box.open = true;
  });
  addEventListener("afterprint", () => {
    for (const grid of grids) grid.print(false);
    for (const box of closed) box.open = false;
  });

  /* ---- a finding by its link, and as Markdown ---- */
  const reveal = () => {
    const found = location.hash && $(location.hash.slice(1));
    const box = found && found.closest("details");
    if (box && !box.open) {
      box.open = true;
      found.scrollIntoView();
    }
  };
  addEventListener("hashchange", reveal);
  reveal();
  const copy = async (button) => {
    const text = button.dataset.markdown;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // a browser that gives a page from disk no clipboard: select the text, and leave it there if it is not copied
      const area = make("textarea", { class: "copied", readonly: "", "aria-label": "the finding as Markdown" });
      area.value = text;
      button.after(area);
      area.select();
      if (!document.execCommand("copy")) {
        button.textContent = "Copy the selected text";
        return;
      }
      area.remove();
    }
    button.textContent = "Copied";
  };
  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", () => copy(button));
    button.hidden = false;
  }

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
