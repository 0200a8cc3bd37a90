// openai, the Node SDK, with the tool loop that most people write by hand.
// MODE: create | stream | helper | parse. STORE, INCLUDE.
import { BASE_URL, CITY, INSTRUCTIONS, KEY, MODE, MODEL, PROMPTS, STORE, TOOLS, final, use } from './common.mjs';
const { default: OpenAI } = await import('openai');

const client = new OpenAI({ baseURL: BASE_URL, apiKey: KEY });
const tools = TOOLS.map((name) => ({ type: 'function', name, description: name, strict: true, parameters: CITY }));
const more = {};
if (STORE !== undefined) more.store = STORE;
if (process.env.INCLUDE) more.include = ['reasoning.encrypted_content'];
if (MODE === 'parse') {
  const schema = { type: 'object', properties: { answer: { type: 'string' } }, required: ['answer'], additionalProperties: false };
  more.text = { format: { type: 'json_schema', name: 'answer', strict: true, schema } };
}

async function ask(input) {
  const body = { model: MODEL, instructions: INSTRUCTIONS, input, tools, ...more };
  if (MODE === 'create') return client.responses.create(body);
  if (MODE === 'parse') return client.responses.parse(body);
  if (MODE === 'helper') return client.responses.stream(body).finalResponse();
  let response;
  for await (const event of await client.responses.create({ ...body, stream: true })) {
    if (event.type === 'response.completed') response = event.response;
  }
  if (!response) throw new Error('the stream ended without response.completed');
  return response;
}

const input = [];
for (const prompt of PROMPTS) {
  input.push({ role: 'user', content: prompt });
  for (;;) {
    const response = await ask(input);
    input.push(...response.output);
    const calls = response.output.filter((item) => item.type === 'function_call');
    if (!calls.length) {
      final(response.output_text ?? response.output.at(-1).content[0].text);
      break;
    }
    for (const call of calls) {
      const output = JSON.stringify(use(call.name, JSON.parse(call.arguments).city));
      input.push({ type: 'function_call_output', call_id: call.call_id, output });
    }
  }
}
