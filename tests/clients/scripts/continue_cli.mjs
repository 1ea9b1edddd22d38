// Continue's command line: an answer with its own tools.
import { spawnSync } from 'node:child_process'
import { writeFileSync } from 'node:fs'
import { fileURLToPath } from 'node:url'

const cn = fileURLToPath(new URL('node_modules/.bin/cn', import.meta.url))
const model = process.env.MODEL
// JSON is YAML, too.
const config = {
  name: 'Baton',
  version: '0.0.1',
  schema: 'v1',
  models: [
    {
      name: model,
      provider: 'openai',
      model,
      apiBase: process.env.OPENAI_BASE_URL,
      apiKey: process.env.OPENAI_API_KEY,
      roles: ['chat'],
      capabilities: ['tool_use'],
      defaultCompletionOptions: { contextLength: 60_000, maxTokens: 48 }
    }
  ]
}
writeFileSync('config.yaml', JSON.stringify(config))
const done = spawnSync(cn, ['-p', '--config', `${process.cwd()}/config.yaml`, 'What is the capital of France?'], {
  encoding: 'utf-8',
  input: '',
  timeout: 240_000,
  env: { PATH: process.env.PATH, HOME: process.cwd(), CONTINUE_TELEMETRY_ENABLED: '0' }
})
if (done.error) throw done.error
if (done.status || !done.stdout.trim()) throw new Error(`no answer: ${done.stdout} ${done.stderr.slice(-300)}`)
console.log('an answer of', done.stdout.trim().length, 'characters')
