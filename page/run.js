// The moments of a run: what lives at each of its events, of the tables of graphmem/reports/moments.py.

async function unpacked(text) {
  const packed = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

const summed = (steps) => {
  let value = 0;
  return Float64Array.from(steps, (step) => (value += step));
};

export async function read(text) {
  const run = await unpacked(text);
  for (const table of [run.events, run.storages, run.operators]) {
    for (const name of Object.keys(table)) if (run.steps.includes(name)) table[name] = summed(table[name]);
  }
  return new Run(run);
}

class Run {
  constructor(tables) {
    Object.assign(this, tables);
    const { born, lasts } = this.storages;
    this.size = this.events.operator.length;
    this.dies = Float64Array.from(born, (at, one) => (lasts[one] ? at + lasts[one] : this.size));
    this.storageAt = new Int32Array(this.size).fill(-1); // that is born or dies at an event
    born.forEach((at, one) => {
      this.storageAt[at] = one;
      if (lasts[one]) this.storageAt[this.dies[one]] = one;
    });
  }

  phaseAt(event) {
    return this.operators.phase[this.events.operator[event]];
  }

  /** The operator of an event in words: its name, module and source line. */
  operatorOf(event) {
    const at = this.events.operator[event];
    return Object.fromEntries(
      ["name", "module", "source"].map((name) => [name, this.strings[this.operators[name][at]]]),
    );
  }

  /** A storage in words, with its maker's. */
  storage(one) {
    const { storages, strings } = this,
      maker = this.operatorOf(storages.born[one]);
    const label = strings[storages.label[one]];
    return {
      bytes: storages.bytes[one],
      category: this.categories[storages.category[one]],
      label,
      name: label || maker.name,
      operator: maker.name,
      module: strings[storages.module[one]] || "(no module)",
      source: maker.source || "(no line)",
      phase: this.phases[this.phaseAt(storages.born[one])],
    };
  }

  /** The storages that live after an event. */
  liveAt(event) {
    const found = [],
      { born } = this.storages;
    for (let one = 0; one < born.length && born[one] <= event; one++) if (this.dies[one] > event) found.push(one);
    return found;
  }

  /** Stretches of one phase: [first event, last, phase]. */
  stretches() {
    const found = [];
    for (let event = 0; event < this.size; event++) {
      const phase = this.phaseAt(event),
        last = found.at(-1);
      if (last && last[2] === phase) last[1] = event;
      else found.push([event, event, phase]);
    }
    return found;
  }

  /** The requested bytes of groups of storages after every event: [{keys, values}], the largest at the peak first.
   * `key` gives the group of a storage; all beyond `most` groups are one. */
  layers(key, most) {
    const { bytes, born } = this.storages,
      keys = Array.from(bytes, (_, one) => key(one));
    const sizes = new Map(keys.map((name) => [name, 0])),
      layers = new Map();
    for (const one of this.liveAt(this.peak)) sizes.set(keys[one], sizes.get(keys[one]) + bytes[one]);
    [...sizes]
      .sort((a, b) => b[1] - a[1])
      .forEach(([name], at) => {
        const layer = at > most ? [...layers.values()].at(-1) : { keys: [], values: new Float64Array(this.size) };
        layer.keys.push(name);
        layers.set(name, layer);
      });
    keys.forEach((name, one) => {
      const { values } = layers.get(name);
      values[born[one]] += bytes[one];
      if (this.dies[one] < this.size) values[this.dies[one]] -= bytes[one];
    });
    const found = [...new Set(layers.values())];
    for (const { values } of found) for (let event = 1; event < this.size; event++) values[event] += values[event - 1];
    return found;
  }
}
