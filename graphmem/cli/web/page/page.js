// The page: a form whose settings stand in the address, a question to /v1, and the report of the answer.
"use strict";

const form = document.getElementById("question");
const file = document.getElementById("file");
const element = (id) => document.getElementById(id);
const NUMBERS = ["batch", "seq_len", "zero", "world_size", "tp", "load"];
let cancelled = null;

function asked() {
  return form.elements.ask.value;
}

function showFields() {
  for (const label of form.querySelectorAll("[data-for]")) {
    label.hidden = !label.dataset.for.split(" ").includes(asked());
  }
}

// The settings that belong to the question and are given, as text.
function settings() {
  const found = {};
  for (const field of form.querySelectorAll("[name]:not([type=radio])")) {
    if (field.value !== "" && !field.closest("[hidden]")) found[field.name] = field.value;
  }
  return found;
}

function typed(values) {
  const found = {};
  for (const [name, text] of Object.entries(values)) {
    found[name] = NUMBERS.includes(name) ? Number(text) : text === "true" ? true : text === "false" ? false : text;
  }
  return found;
}

function fromAddress() {
  for (const [name, value] of new URLSearchParams(location.search)) {
    const field = form.elements[name];
    if (field) field.value = value;
  }
  showFields();
}

function toAddress() {
  const query = new URLSearchParams({ ask: asked(), ...settings() });
  history.replaceState(null, "", `?${query}`);
}

async function uploaded() {
  if (!file.files.length) return null;
  const sent = await fetch(`/v1/files?name=${encodeURIComponent(file.files[0].name)}`, { method: "POST", body: file.files[0] });
  const told = await sent.json();
  if (!sent.ok) throw new Error(told.error);
  return told.file;
}

// The finished answer of a job, told meanwhile how long it takes.
async function waited(job) {
  const events = new EventSource(job.events);
  return new Promise((resolve, reject) => {
    cancelled = () => fetch(job.self, { method: "DELETE" });
    events.onmessage = async (event) => {
      const told = JSON.parse(event.data);
      element("state").textContent = `${told.state}, ${told.seconds.toFixed(1)} s`;
      if (["waiting", "running"].includes(told.state)) return;
      events.close();
      resolve(await fetch(job.self));
    };
    events.onerror = () => { events.close(); reject(new Error("the connection ended")); };
  });
}

async function answer() {
  const question = typed(settings());
  const sent = await uploaded();
  if (sent) question[asked() === "replay" ? "snapshot" : "model"] = sent;
  const headers = { "Content-Type": "application/json" };
  let response = await fetch(`/v1/${asked()}?wait=0.5`, { method: "POST", headers, body: JSON.stringify(question) });
  if (response.status === 202) response = await waited(await response.json());
  const told = await response.json();
  if (!response.ok) throw new Error(told.error);
  return { told, question, command: response.headers.get("X-Command"), link: response.headers.get("Link") };
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(bytes) >= 1024 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  return `${bytes.toFixed(unit ? 2 : 0)} ${units[unit]}`;
}

const VERDICTS = { yes: "Fits", no: "Does not fit", likely: "Likely fits", "likely not": "Likely does not fit" };

function verdict(told, question) {
  const estimate = told.schema === "graphmem.advice/1" ? told.base : told.estimate || told;
  if (told.schema === "graphmem.fit/1") return [`The largest ${told.size}: ${told.largest}`, told.largest > 0];
  if (told.schema === "graphmem.serving/1") return [told.starts ? `${told.kv_cache.tokens} tokens of KV cache` : told.refusal, told.starts];
  if (told.schema === "graphmem.plan/1") return [`${told.fitting.length} layouts fit`, told.fitting.length > 0];
  const needs = `${size(estimate.peak.device_bytes)} of device memory`;
  const fails = (estimate.diagnostics ?? []).find(({ code }) => code === "step_fails");
  if (fails) return [`Fails on any card: ${fails.message}. Its memory: ${needs}`, false];
  if (!estimate.fits) return [`Needs ${needs}`, true];
  const isAssumed = !question.gpu && !question.gpu_memory && !estimate.details.out_of_memory;
  const card = `${estimate.fits.gpu}${isAssumed ? " (assumed: no card was named)" : ""}`;
  return [`${VERDICTS[estimate.fits.verdict]} ${card}: needs ${needs}`, estimate.fits.fits];
}

function show({ told, question, command, link }) {
  const [words, good] = verdict(told, question);
  element("verdict").textContent = words;
  element("verdict").className = good ? "yes" : "no";
  element("command").textContent = command;
  element("report").src = link.match(/<([^>]+)>; rel="alternate"/)[1];
  element("answer").hidden = false;
}

form.addEventListener("change", showFields);
element("cancel").addEventListener("click", () => cancelled && cancelled());
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  toAddress();
  element("answer").hidden = true;
  element("verdict").textContent = "";
  element("state").textContent = "asking";
  element("cancel").hidden = false;
  try {
    show(await answer());
    element("state").textContent = "";
  } catch (error) {
    element("state").textContent = "";
    element("verdict").textContent = error.message;
    element("verdict").className = "no";
  }
  element("cancel").hidden = true;
  cancelled = null;
});

fetch("/v1/choices").then((response) => response.json()).then((choices) => {
  for (const name of ["gpus", "models"]) {
    element(name).append(...choices[name].map((one) => Object.assign(document.createElement("option"), { value: one })));
  }
});
fromAddress();
if (location.search.includes("model=")) form.requestSubmit();
