// @openai/agents. MODE: run | stream. VARIANT: list | session | previous | handoff | tool | parallel.
// API: chat for Chat Completions.
import { BASE_URL, CHAT, INSTRUCTIONS, KEY, MODE, MODEL, PROMPTS, STORE, TOOLS, final, use } from './common.mjs';
process.env.OPENAI_API_KEY = KEY;
process.env.OPENAI_BASE_URL = BASE_URL;
process.env.OPENAI_AGENTS_DISABLE_TRACING = '1';
const sdk = await import('@openai/agents');
const { z } = await import('zod');
sdk.setTracingDisabled(true);
if (CHAT) sdk.setOpenAIAPI('chat_completions');

const variant = process.env.VARIANT ?? 'list';
const tools = TOOLS.map((name) => sdk.tool({
  name,
  description: name,
  parameters: z.object({ city: z.string() }),
  execute: async ({ city }) => JSON.stringify(use(name, city)),
}));
const modelSettings = STORE === undefined
  ? {}
  : { store: STORE, providerData: { include: ['reasoning.encrypted_content'] } };
const specialist = new sdk.Agent({ name: 'Specialist', instructions: INSTRUCTIONS, model: MODEL, tools, modelSettings });

function starter() {
  const common = { name: 'Triage', instructions: 'Hand it on.', model: MODEL, modelSettings };
  if (variant === 'handoff') return sdk.Agent.create({ ...common, handoffs: [specialist] });
  if (variant !== 'tool') return specialist;
  const inner = specialist.asTool({ toolName: 'ask_specialist', toolDescription: 'Ask.' });
  return new sdk.Agent({ ...common, tools: [inner] });
}

async function once(agent, input, options) {
  const result = await sdk.run(agent, input, { ...options, stream: MODE === 'stream' });
  if (MODE === 'stream') {
    for await (const _ of result);
    await result.completed;
  }
  return result;
}

async function converse(agent) {
  const session = variant === 'session' ? new sdk.MemorySession() : undefined;
  const texts = [];
  let history = [];
  let previous;
  for (const prompt of PROMPTS) {
    const chained = session || variant === 'previous';
    const input = chained ? prompt : [...history, { role: 'user', content: prompt }];
    const options = { ...(session && { session }), ...(previous && { previousResponseId: previous }) };
    const result = await once(agent, input, options);
    history = result.history;
    if (variant === 'previous') previous = result.lastResponseId;
    texts.push(result.finalOutput);
  }
  return texts;
}

if (variant === 'parallel') {
  const all = await Promise.all([1, 2, 3].map(() => converse(specialist)));
  all[0].forEach((_, turn) => final(all.map((texts) => texts[turn]).join(' | ')));
} else {
  (await converse(starter())).forEach(final);
}
