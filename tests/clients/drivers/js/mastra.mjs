// Mastra's Agent on an AI SDK model. MODE: stream | generate. API: chat for Chat Completions.
import { BASE_URL, CHAT, INSTRUCTIONS, KEY, MODE, MODEL, PROMPTS, TOOLS, final, use } from './common.mjs';
process.env.MASTRA_TELEMETRY_DISABLED = '1';
const { Agent } = await import('@mastra/core/agent');
const { createTool } = await import('@mastra/core/tools');
const { createOpenAI } = await import('@ai-sdk/openai');
const { z } = await import('zod');

const make = (id) => createTool({
  id,
  description: id,
  inputSchema: z.object({ city: z.string() }),
  execute: async (given) => use(id, given.city ?? given.context?.city),
});
const provider = createOpenAI({ baseURL: BASE_URL, apiKey: KEY });
const agent = new Agent({
  id: 'weather',
  name: 'weather',
  instructions: INSTRUCTIONS,
  model: CHAT ? provider.chat(MODEL) : provider(MODEL),
  tools: Object.fromEntries(TOOLS.map((id) => [id, make(id)])),
});

const messages = [];
for (const prompt of PROMPTS) {
  messages.push({ role: 'user', content: prompt });
  const result = await agent[MODE](messages, { maxSteps: 8 });
  const text = await result.text;
  messages.push(...((await result.response)?.messages ?? []));
  final(text);
}
