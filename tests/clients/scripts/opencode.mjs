// OpenCode: an answer with its own tools, by the provider that its documentation has for such servers.
import { spawnSync } from 'node:child_process'
import { mkdirSync, writeFileSync } from 'node:fs'
import { fileURLToPath } from 'node:url'

const opencode = fileURLToPath(new URL('node_modules/.bin/opencode', import.meta.url))
const model = process.env.MODEL
const options = { baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY }
const limit = { context: 60_000, output: 48 }
const config = {
  autoupdate: false,
  share: 'disabled',
  model: `baton/${model}`,
  small_model: `baton/${model}`,
  provider: {
    baton: { npm: '@ai-sdk/openai-compatible', name: 'Baton', options, models: { [model]: { name: model, limit } } }
  }
}
mkdirSync('opencode', { recursive: true })
writeFileSync('opencode/opencode.json', JSON.stringify(config))
const words = ['run', '--format', 'json', 'What is the capital of France?']
const done = spawnSync(opencode, words, {
  cwd: 'opencode',
  encoding: 'utf-8',
  input: '',
  timeout: 240_000,
  env: { PATH: process.env.PATH, HOME: process.cwd() }
})
if (done.error) throw done.error
const events = done.stdout.split('\n').filter((line) => line.startsWith('{')).map((line) => JSON.parse(line))
const said = events.find((each) => each.type === 'text')?.part?.text
if (!said) throw new Error(`no answer: ${done.stdout.slice(-200)} ${done.stderr.slice(-200)}`)
console.log('an answer of', said.length, 'characters')
