// What the drivers of npm libraries share: imports from the client's own directory, two tools, the
// prompts, and how a final output is told: a line `FINAL` with the text as JSON.
import { registerHooks } from 'node:module';
import { pathToFileURL } from 'node:url';

const here = new URL('.', import.meta.url).href;
const base = pathToFileURL(`${process.env.CLIENT_DIR}/driver.mjs`).href;
registerHooks({
  resolve(specifier, context, next) {
    const bare = !/^(\.|\/|node:|file:)/.test(specifier);
    return bare && context.parentURL?.startsWith(here)
      ? next(specifier, { ...context, parentURL: base })
      : next(specifier, context);
  },
});

export const BASE_URL = process.env.BASE_URL;
export const KEY = process.env.OPENAI_API_KEY;
export const MODEL = process.env.MODEL ?? 'gpt-5.2';
export const MODE = process.env.MODE ?? '';
export const CHAT = process.env.API === 'chat'; // Chat Completions in place of Responses
export const STORE = process.env.STORE === undefined ? undefined : process.env.STORE === 'true';
export const INSTRUCTIONS = 'Be brief.';
export const PROMPTS = ['What are the weather and the time? \u2013 caf\u00e9 <b>&</b>', 'Again please.'];
export const CITY = {
  type: 'object',
  properties: { city: { type: 'string' } },
  required: ['city'],
  additionalProperties: false,
};
export const TOOLS = ['get_weather', 'get_time'];

// What a tool gives: an object for the one, text for the other.
export function use(name, city) {
  return name === 'get_weather' ? { city, temp_c: 7.5 } : `12:00 in ${city}`;
}

export function final(text) {
  console.log('FINAL ' + JSON.stringify(typeof text === 'string' ? text : JSON.stringify(text)));
}
