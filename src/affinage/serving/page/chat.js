"use strict";

const WORDS = {
  en: {
    reset: "New conversation", settings: "Settings", system: "System prompt", temperature: "Temperature",
    length: "Longest answer (tokens)", token: "API key", send: "Send", stop: "Stop", other: "Français",
    message: "Your message", empty: "Say something. Nothing is kept once this page is closed.",
    unreachable: "The server cannot be reached.", cut: "The answer has been cut short.", long: "longest answer",
    you: "You", model: "Model",
  },
  fr: {
    reset: "Nouvelle conversation", settings: "Réglages", system: "Invite système", temperature: "Température",
    length: "Longueur maximale (tokens)", token: "Clé d’API", send: "Envoyer", stop: "Arrêter", other: "English",
    message: "Votre message", empty: "Dites quelque chose. Rien n’est gardé une fois la page fermée.",
    unreachable: "Le serveur est injoignable.", cut: "La réponse a été interrompue.", long: "longueur maximale",
    you: "Vous", model: "Modèle",
  },
};

const $ = (id) => document.getElementById(id);
let language = (navigator.language || "en").startsWith("fr") ? "fr" : "en";
let history = [];
let underway = null; // the AbortController of the answer that is coming

function speak() {
  const words = WORDS[language];
  document.documentElement.lang = language;
  for (const element of document.querySelectorAll("[data-word]")) element.textContent = words[element.dataset.word];
  $("language").textContent = words.other;
  $("message").placeholder = words.message;
  $("message").setAttribute("aria-label", words.message);
  for (const element of document.querySelectorAll(".said")) label(element);
}

function label(element) {
  const words = WORDS[language];
  element.setAttribute("aria-label", element.classList.contains("user") ? words.you : words.model);
}

function show(kind, text) {
  const element = document.createElement("div");
  element.className = `said ${kind}`;
  element.textContent = text; // never as markup: a model may say anything
  label(element);
  $("empty").hidden = true;
  $("talk").append(element);
  $("talk").scrollTop = $("talk").scrollHeight;
  return element;
}

function headers() {
  const token = $("token").value.trim();
  return { "Content-Type": "application/json", ...(token ? { Authorization: `Bearer ${token}` } : {}) };
}

async function greet() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (response.ok) {
      const name = (await response.json()).data[0].id;
      $("model").textContent = name;
      document.title = `${name} · affinage`;
    } else if (response.status === 401) {
      $("settings").open = true;
      $("token").focus();
    }
  } catch {
    show("error", WORDS[language].unreachable);
  }
}

// The values of the events of a stream of server-sent events.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function ask(text) {
  const system = $("system").value.trim();
  const question = { role: "user", content: text };
  const settings = { temperature: Number($("temperature").value), max_tokens: Number($("length").value) || 256 };
  show("user", text);
  underway = new AbortController();
  const mine = underway;
  busy(true);
  let answer = null, said = "", trouble = "";
  try {
    let response, refused;
    do { // the oldest exchanges are forgotten when the conversation outgrows the model
      if (refused) history = history.slice(2);
      const messages = [...(system ? [{ role: "system", content: system }] : []), ...history, question];
      const body = JSON.stringify({ messages, ...settings, stream: true });
      response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body, signal: mine.signal });
      refused = response.ok ? null : (await response.json()).error;
    } while (refused && refused.code === "context_length_exceeded" && history.length);
    if (refused) {
      trouble = refused.message;
      if (response.status === 401) $("settings").open = true;
    } else {
      answer = show("assistant", "");
      answer.setAttribute("aria-busy", "true");
      trouble = WORDS[language].cut;
      for await (const event of events(response.body)) {
        if (event.error) { trouble = event.error.message; break; }
        const choice = event.choices[0];
        said += (choice && choice.delta.content) || "";
        if (choice && choice.finish_reason) trouble = "";
        if (choice && choice.finish_reason === "length") answer.dataset.cut = WORDS[language].long;
        const atEnd = $("talk").scrollHeight - $("talk").scrollTop - $("talk").clientHeight < 60;
        answer.textContent = said;
        if (atEnd) $("talk").scrollTop = $("talk").scrollHeight;
      }
    }
  } catch (error) {
    trouble = error.name === "AbortError" ? "" : WORDS[language].unreachable;
  }
  if (answer) answer.setAttribute("aria-busy", "false");
  if (mine !== underway) return; // another conversation has begun
  if (answer) history.push(question, { role: "assistant", content: said });
  else $("message").value ||= text;
  if (trouble) show("error", trouble);
  underway = null;
  busy(false);
}

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  if (!is) $("message").focus();
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("message").value.trim();
  if (!text || underway) return;
  $("message").value = "";
  ask(text);
});
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => underway && underway.abort());
$("reset").addEventListener("click", () => {
  if (underway) underway.abort();
  underway = null;
  history = [];
  for (const element of document.querySelectorAll(".said")) element.remove();
  $("empty").hidden = false;
  busy(false);
});
$("language").addEventListener("click", () => { language = language === "en" ? "fr" : "en"; speak(); });
$("token").addEventListener("change", greet);

// What stands after # is not sent to any server, and leaves the address once it is read.
const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  $("token").value = given;
  window.history.replaceState(null, "", location.pathname);
}
speak();
greet();
