// openai, the Node SDK, on Chat Completions. MODE: create | stream (helper) | tools (runTools).
import { BASE_URL, CITY, INSTRUCTIONS, KEY, MODE, MODEL, PROMPTS, TOOLS, final, use } from './common.mjs';
const { default: OpenAI } = await import('openai');

const client = new OpenAI({ baseURL: BASE_URL, apiKey: KEY });
const run = (name, text) => JSON.stringify(use(name, JSON.parse(text).city));
const tools = TOOLS.map((name) => ({
  type: 'function',
  function: {
    name,
    description: name,
    parameters: CITY,
    ...(MODE === 'tools' && { parse: JSON.parse, function: ({ city }) => JSON.stringify(use(name, city)) }),
  },
}));

async function ask(messages) {
  const body = { model: MODEL, messages, tools };
  if (MODE === 'create') return (await client.chat.completions.create(body)).choices[0].message;
  const stream = client.chat.completions.stream({ ...body, stream_options: { include_usage: true } });
  return (await stream.finalChatCompletion()).choices[0].message;
}

const messages = [{ role: 'system', content: INSTRUCTIONS }];
for (const prompt of PROMPTS) {
  messages.push({ role: 'user', content: prompt });
  if (MODE === 'tools') {
    const runner = client.chat.completions.runTools({ model: MODEL, messages, stream: true, tools });
    await runner.done();
    messages.splice(0, messages.length, ...runner.messages);
    final(messages.at(-1).content);
    continue;
  }
  for (;;) {
    const message = await ask(messages);
    messages.push(message);
    if (!message.tool_calls?.length) {
      final(message.content);
      break;
    }
    for (const { id, function: called } of message.tool_calls) {
      messages.push({ role: 'tool', tool_call_id: id, content: run(called.name, called.arguments) });
    }
  }
}
