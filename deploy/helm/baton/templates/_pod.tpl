{{/* What do all pods have in common? */}}

{{- define "baton.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* dict root, component, one (its values). */}}
{{- define "baton.podMetadata" -}}
labels:
  {{- include "baton.selector" . | nindent 2 }}
  app.kubernetes.io/part-of: baton
  {{- with .one.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .one.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* dict root, one, hooksSeconds: what comes before SIGTERM. Baton's own margin beyond its drain is under half a minute. */}}
{{- define "baton.podSpec" -}}
{{- $v := .root.Values -}}
serviceAccountName: {{ include "baton.serviceAccount" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add .one.drainSeconds .hooksSeconds 30 }}
securityContext:
  {{- toYaml $v.podSecurityContext | nindent 2 }}
{{- with $v.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .one.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .one.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .one.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .one.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .one.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Over nodes as far as possible, if values have no constraints: dict root, component, one. */}}
{{- define "baton.spread" -}}
topologySpreadConstraints:
  {{- with .one.topologySpreadConstraints }}
  {{- toYaml . | nindent 2 }}
  {{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "baton.selector" . | nindent 8 }}
  {{- end }}
{{- end -}}

{{/* Where the volume of the model comes from, "download", "volume" or "": dict root, component. */}}
{{- define "baton.modelSource" -}}
{{- $model := .root.Values.model -}}
{{- $own := eq .component "bootstrap" | ternary .root.Values.bootstrap.model (dict "path" "") -}}
{{- if $own.path -}}{{ $own.volume | empty | ternary "" "volume" }}
{{- else if $model.download.repository -}}download
{{- else if $model.volume -}}volume
{{- end -}}
{{- end -}}

{{/* Fetches the model, where that is asked for: dict root, one, image, component. The bootstrap needs no weights. */}}
{{- define "baton.download" -}}
{{- $d := .root.Values.model.download -}}
{{- if eq (include "baton.modelSource" .) "download" -}}
initContainers:
  - name: model
    image: {{ .image }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    command: [hf, download]
    args:
      - {{ $d.repository | quote }}
      - --local-dir={{ .root.Values.model.mountPath }}
      {{- with $d.revision }}
      - --revision={{ . }}
      {{- end }}
      {{- if and (eq .component "bootstrap") (not .root.Values.model.gguf) }}
      {{- range list "*.safetensors" "*.bin" "*.pt*" "*.gguf" "*.onnx*" "*.h5" "consolidated*" }}
      - --exclude={{ . }}
      {{- end }}
      {{- end }}
    env:
      - {name: HOME, value: /home/baton}
      {{- if $d.tokenSecret.name }}
      - name: HF_TOKEN
        valueFrom:
          secretKeyRef: {name: {{ $d.tokenSecret.name }}, key: {{ default "token" $d.tokenSecret.key }}}
      {{- end }}
      {{- with concat .root.Values.env .one.env }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    securityContext:
      {{- include "baton.containerSecurity" . | nindent 6 }}
    resources:
      requests: {cpu: 500m, memory: 1Gi}
      limits: {memory: 4Gi}
    volumeMounts:
      - {name: model, mountPath: {{ .root.Values.model.mountPath }}}
      - {name: home, mountPath: /home/baton}
      - {name: tmp, mountPath: /tmp}
{{- end -}}
{{- end -}}

{{/* What a container may write to, and what it reads: dict root, component, security. Nothing else is written to. */}}
{{- define "baton.mounts" -}}
- {name: home, mountPath: /home/baton}
- {name: tmp, mountPath: /tmp}
{{- if include "baton.modelSource" . }}
- {name: model, mountPath: {{ .root.Values.model.mountPath }}, readOnly: true}
{{- end }}
{{- if .security.grpc }}
- {name: grpc-tls, mountPath: /etc/baton/grpc-tls, readOnly: true}
{{- end }}
{{- end -}}

{{- define "baton.volumes" -}}
- name: home
  emptyDir: {}
- name: tmp
  emptyDir: {}
{{- $source := include "baton.modelSource" . }}
{{- if eq $source "download" }}
- name: model
  emptyDir: {sizeLimit: {{ .root.Values.model.download.sizeLimit }}}
{{- else if eq $source "volume" }}
{{- $own := and (eq .component "bootstrap") .root.Values.bootstrap.model.path }}
- name: model
  {{- toYaml ($own | empty | ternary .root.Values.model.volume .root.Values.bootstrap.model.volume) | nindent 2 }}
{{- end }}
{{- if .security.grpc }}
- name: grpc-tls
  secret: {secretName: {{ get .security.grpc .component }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/* Flags that all services have: dict root, one, component, security. Secrets are files, never flags. */}}
{{- define "baton.commonFlags" -}}
{{- $model := required "model.path must be said: a directory or a GGUF file below model.mountPath, or demo" .root.Values.model.path -}}
{{- $own := eq .component "bootstrap" | ternary .root.Values.bootstrap.model.path "" -}}
- --host=0.0.0.0
- --model={{ default $model $own }}
- --drain-timeout-ms={{ .one.drainSeconds }}s
- --log-level={{ .root.Values.logging.level }}
- --log-format={{ .root.Values.logging.format }}
{{- with .root.Values.tracing.otlpEndpoint }}
- --otlp-endpoint={{ . }}
{{- end }}
{{- if .security.grpc }}
- --tls-cert=/etc/baton/grpc-tls/tls.crt
- --tls-key=/etc/baton/grpc-tls/tls.key
- --tls-ca=/etc/baton/grpc-tls/ca.crt
{{- end }}
{{- range $name, $value := .one.settings }}
- --{{ $name }}={{ if kindIs "float64" $value }}{{ if eq $value (float64 (int64 $value)) }}{{ int64 $value }}{{ else }}{{ $value }}{{ end }}{{ else }}{{ $value }}{{ end }}
{{- end }}
{{- end -}}

{{/* dict root, one. */}}
{{- define "baton.env" -}}
- name: POD_NAME
  valueFrom:
    fieldRef: {fieldPath: metadata.name}
- name: POD_IP
  valueFrom:
    fieldRef: {fieldPath: status.podIP}
- {name: HOME, value: /home/baton}
{{- with concat .root.Values.env .one.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}
