// The Vercel AI SDK 5, 6 or 7 with its own agent loop. MODE: generate | stream. STORE. SYSTEM: the
// name of the option for instructions. API: chat for Chat Completions,
// with MODEL_PROVIDER=compatible by the provider of compatible services.
import { BASE_URL, CHAT, INSTRUCTIONS, KEY, MODE, MODEL, PROMPTS, STORE, final, use } from './common.mjs';
const { generateText, isStepCount, stepCountIs, streamText, tool } = await import('ai');
const compatible = process.env.MODEL_PROVIDER === 'compatible';
const { createOpenAI } = compatible ? {} : await import('@ai-sdk/openai');
const { createOpenAICompatible } = compatible ? await import('@ai-sdk/openai-compatible') : {};
const { z } = await import('zod');

const inputSchema = z.object({ city: z.string() });
const make = (name) => tool({ description: name, inputSchema, execute: async ({ city }) => use(name, city) });
const openai = { ...(CHAT ? {} : { reasoningSummary: 'auto' }), ...(STORE === undefined ? {} : { store: STORE }) };
const provider = compatible
  ? createOpenAICompatible({ name: 'turnwire', baseURL: BASE_URL, apiKey: KEY })
  : createOpenAI({ baseURL: BASE_URL, apiKey: KEY });
const messages = [];
const options = {
  model: CHAT && !compatible ? provider.chat(MODEL) : provider(MODEL),
  tools: { get_weather: make('get_weather'), get_time: make('get_time') },
  messages,
  [process.env.SYSTEM ?? 'instructions']: INSTRUCTIONS,
  stopWhen: (stepCountIs ?? isStepCount)(8),
  providerOptions: { openai },
};

async function ask() {
  if (MODE === 'generate') {
    const result = await generateText(options);
    return [result.text, result.responseMessages ?? result.response.messages];
  }
  const result = streamText({ ...options, onError: ({ error }) => { throw error; } });
  for await (const _ of result.fullStream ?? result.stream);
  return [await result.text, (await result.responseMessages) ?? (await result.response).messages];
}

for (const prompt of PROMPTS) {
  messages.push({ role: 'user', content: prompt });
  const [text, made] = await ask();
  messages.push(...made);
  final(text);
}
