// Claude Code: an answer, its stream, and a prompt that is longer than the model's context.
import { spawnSync } from 'node:child_process'
import { fileURLToPath } from 'node:url'

const claude = fileURLToPath(new URL('node_modules/.bin/claude', import.meta.url))
const question = ['-p', 'What is the capital of France?']
const short = ['--system-prompt', 'Be brief.', '--tools', '']

function ask(...words) {
  const done = spawnSync(claude, [...question, ...words], {
    encoding: 'utf-8',
    input: '',
    timeout: 120_000,
    env: {
      PATH: process.env.PATH,
      HOME: process.cwd(),
      ANTHROPIC_BASE_URL: process.env.ANTHROPIC_BASE_URL,
      ANTHROPIC_AUTH_TOKEN: process.env.ANTHROPIC_API_KEY,
      ANTHROPIC_MODEL: process.env.MODEL,
      ANTHROPIC_DEFAULT_HAIKU_MODEL: process.env.MODEL,
      CLAUDE_CODE_MAX_OUTPUT_TOKENS: '48',
      CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: '1'
    }
  })
  if (done.error) throw done.error
  return done.stdout.trim()
}

const whole = JSON.parse(ask(...short, '--output-format', 'json'))
// A small model may not come to an end: then the client says that its answer was cut off.
const cut = whole.is_error && String(whole.result).includes('output token maximum')
if (!cut && (whole.is_error || !whole.result)) throw new Error(`no answer: ${whole.result}`)
console.log(cut ? 'an answer that is cut off, and said to be' : 'an answer')

const events = ask(...short, '--output-format', 'stream-json', '--verbose', '--include-partial-messages')
  .split('\n')
  .map((line) => JSON.parse(line))
const kinds = events.filter((each) => each.type === 'stream_event').map((each) => each.event.type)
if (kinds.at(-1) !== 'message_stop') throw new Error(`the stream ended with ${kinds.at(-1)}`)
console.log('a stream:', kinds.length, 'events')

const said = ask()
if (!said.includes('Prompt is too long')) throw new Error(`its own prompt of 18,000 tokens: ${said}`)
console.log('too long a prompt:', said.split(' · ')[0])
