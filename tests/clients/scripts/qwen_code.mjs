// Qwen Code: an answer with its own tools.
import { spawnSync } from 'node:child_process'
import { mkdirSync, writeFileSync } from 'node:fs'
import { fileURLToPath } from 'node:url'

const qwen = fileURLToPath(new URL('node_modules/.bin/qwen', import.meta.url))
mkdirSync('.qwen', { recursive: true })
const settings = { model: { generationConfig: { samplingParams: { max_tokens: 48 } } } }
writeFileSync('.qwen/settings.json', JSON.stringify(settings))
const words = ['--auth-type', 'openai', '--output-format', 'json', 'What is the capital of France?']
const done = spawnSync(qwen, words, {
  encoding: 'utf-8',
  input: '',
  timeout: 240_000,
  env: {
    PATH: process.env.PATH,
    HOME: process.cwd(),
    OPENAI_BASE_URL: process.env.OPENAI_BASE_URL,
    OPENAI_API_KEY: process.env.OPENAI_API_KEY,
    OPENAI_MODEL: process.env.MODEL
  }
})
if (done.error) throw done.error
const result = JSON.parse(done.stdout.slice(done.stdout.indexOf('['))).find((each) => each.type === 'result')
if (!result || result.is_error) throw new Error(`no answer: ${done.stdout.slice(-300)}`)
console.log('an answer of', result.result.length, 'characters')
