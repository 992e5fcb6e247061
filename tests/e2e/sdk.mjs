// The npm SDKs of OpenAI and Anthropic against the node at BASE; prints one JSON document of what they got.
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const { BASE, FORCED } = process.env;
const client = new OpenAI({ baseURL: `${BASE}/v1`, apiKey: "none", maxRetries: 0 });
const claude = new Anthropic({ baseURL: BASE, apiKey: "none", maxRetries: 0 });
const plain = { thinking: { type: "disabled" } };
const ask = { model: "random-tiny", messages: [{ role: "user", content: "Hello" }], max_tokens: 12, seed: 5, ...plain };

const whole = await client.chat.completions.create({ ...ask, n: 3, logprobs: true });
const streamed = ["", "", ""];
for await (const chunk of await client.chat.completions.create({ ...ask, n: 3, stream: true })) {
  for (const choice of chunk.choices) streamed[choice.index] += choice.delta.content ?? "";
}

const forced = JSON.parse(FORCED);
const schema = { type: "object", properties: { city: { type: "string" } } };
const tools = [{ type: "function", function: { name: "weather", parameters: schema } }];
const called = await client.chat.completions.create({ ...ask, tools, max_tokens: forced.length, forced_token_ids: forced });

// Leaving in the middle of a long answer.
const controller = new AbortController();
let cancelled = false;
try {
  const endless = { ...ask, max_tokens: 4000, ignore_eos: true, stream: true };
  for await (const _ of await client.chat.completions.create(endless, { signal: controller.signal })) controller.abort();
} catch (error) {
  cancelled = error instanceof OpenAI.APIUserAbortError;
}
cancelled ||= controller.signal.aborted;

let thought = "";
const stream = claude.messages.stream({ model: "random-tiny", max_tokens: 8, messages: ask.messages });
stream.on("thinking", (delta) => (thought += delta));
const message = await stream.finalMessage();

console.log(JSON.stringify({
  whole: whole.choices.map((choice) => choice.message.content),
  logprobs: whole.choices.map((choice) => choice.logprobs.content.length),
  streamed,
  tool: called.choices[0].message.tool_calls?.[0]?.function,
  cancelled,
  thought: thought === message.content[0].thinking && thought.length > 0,
  models: (await client.models.list()).data.map((model) => model.id),
}));
