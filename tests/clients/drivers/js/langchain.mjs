// LangChain JS: ChatOpenAI. MODE: agent | loop. STREAM, ZDR, OUTPUT_VERSION. API: chat for Chat Completions.
import { BASE_URL, CHAT, INSTRUCTIONS, KEY, MODE, MODEL, PROMPTS, TOOLS, final, use } from './common.mjs';
const { ChatOpenAI } = await import('@langchain/openai');
const { HumanMessage } = await import('@langchain/core/messages');
const { tool } = await import('@langchain/core/tools');
const { z } = await import('zod');

const schema = z.object({ city: z.string() });
const run = (name) => async ({ city }) => JSON.stringify(use(name, city));
const tools = TOOLS.map((name) => tool(run(name), { name, description: name, schema }));
const model = new ChatOpenAI({
  model: MODEL,
  apiKey: KEY,
  configuration: { baseURL: BASE_URL },
  useResponsesApi: !CHAT,
  streaming: Boolean(process.env.STREAM),
  ...(process.env.ZDR ? { zdrEnabled: true } : {}),
  ...(process.env.OUTPUT_VERSION ? { outputVersion: process.env.OUTPUT_VERSION } : {}),
});
const text = (message) => message.text ?? message.content;

let messages = [];
let ask;
if (MODE === 'agent') {
  const { createAgent } = await import('langchain');
  const agent = createAgent({ model, tools, systemPrompt: INSTRUCTIONS });
  ask = async () => { messages = (await agent.invoke({ messages })).messages; };
} else {
  const bound = model.bindTools(tools);
  const byName = Object.fromEntries(tools.map((each) => [each.name, each]));
  ask = async () => {
    for (;;) {
      const answer = await bound.invoke(messages);
      messages.push(answer);
      if (!answer.tool_calls?.length) return;
      for (const call of answer.tool_calls) messages.push(await byName[call.name].invoke(call));
    }
  };
}
for (const prompt of PROMPTS) {
  messages.push(new HumanMessage(prompt));
  await ask();
  final(text(messages.at(-1)));
}
