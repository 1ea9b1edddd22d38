// Codex: an answer with its own tools, of which one is not served, by the Responses API.
import { spawnSync } from 'node:child_process'
import { mkdirSync, writeFileSync } from 'node:fs'
import { fileURLToPath } from 'node:url'

const codex = fileURLToPath(new URL('node_modules/.bin/codex', import.meta.url))
mkdirSync('.codex', { recursive: true })
const config = `
model = "${process.env.MODEL}"
model_provider = "baton"
[model_providers.baton]
name = "Baton"
base_url = "${process.env.OPENAI_BASE_URL}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
`
writeFileSync('.codex/config.toml', config)
const words = ['exec', '--json', '--skip-git-repo-check', 'What is the capital of France?']
const done = spawnSync(codex, words, {
  encoding: 'utf-8',
  input: '',
  timeout: 240_000,
  env: { PATH: process.env.PATH, HOME: process.cwd(), OPENAI_API_KEY: process.env.OPENAI_API_KEY }
})
if (done.error) throw done.error
const events = done.stdout.split('\n').filter((line) => line.startsWith('{')).map((line) => JSON.parse(line))
const said = events.find((each) => each.item?.type === 'agent_message')?.item.text
if (!said || events.at(-1).type !== 'turn.completed') throw new Error(`no answer: ${done.stdout.slice(-300)}`)
console.log('an answer of', said.length, 'characters')
