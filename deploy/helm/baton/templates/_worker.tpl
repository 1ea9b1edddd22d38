{{/* What is a worker's pod? dict root, side, one, security, part: "" for a pod that is a whole worker, else "leader" or
"follower" of one that is several pods. */}}

{{- define "baton.ranks" -}}
{{- mul .tp .pp -}}
{{- end -}}

{{- define "baton.ranksOfPod" -}}
{{- div (include "baton.ranks" .) .pods -}}
{{- end -}}

{{/* Says "yes" for a worker of several pods. */}}
{{- define "baton.grouped" -}}
{{- if gt (int .pods) 1 -}}yes{{- end -}}
{{- end -}}

{{/* Compute threads of a rank: the whole cores that the pod asks for, dealt out to the ranks in it. Without it they would
be as many as the node's cores. */}}
{{- define "baton.threads" -}}
{{- $cpu := toString (dig "requests" "cpu" "1" .one.resources) -}}
{{- $cores := int (floor (ternary (divf (trimSuffix "m" $cpu) 1000) $cpu (hasSuffix "m" $cpu))) -}}
{{- max 1 (div $cores (include "baton.ranksOfPod" .one)) -}}
{{- end -}}

{{- define "baton.workerFlags" -}}
- {{ eq .side "both" | ternary "worker" .side }}
- --name=$(POD_NAME)
- --advertise=$(POD_IP)
- --bootstrap={{ include "baton.fullname" .root }}-bootstrap-grpc:{{ .root.Values.ports.grpc }}
- --grpc-port={{ .root.Values.ports.worker }}
- --metrics-port={{ .root.Values.ports.metrics }}
{{- if eq .side "both" }}
- --prefill-grpc-port={{ .root.Values.ports.prefillWorker }}
- --prefill-metrics-port={{ .root.Values.ports.prefillMetrics }}
{{- end }}
- --device={{ gt (int .one.gpu.count) 0 | ternary "cuda" "cpu" }}
{{- if not (hasKey .one.settings "threads") }}
- --threads={{ include "baton.threads" . }}
{{- end }}
{{- if ne .side "both" }}
- --tp={{ .one.tp }}
{{- end }}
{{- if eq .side "prefill" }}
- --pp={{ .one.pp }}
{{- end }}
{{- if not .part }}
- --exit-file=/home/baton/exit
{{- end }}
{{- if .part }}
- --machines={{ .one.pods }}
- --meet-timeout-ms={{ .one.startupSeconds }}s
{{- end }}
{{- if eq .part "leader" }}
- --machine=0
- --rendezvous=$(POD_IP):{{ .root.Values.ports.rendezvous }}
{{- else if eq .part "follower" }}
- --machine=$(LWS_WORKER_INDEX)
- --rendezvous=$(LWS_LEADER_ADDRESS):{{ .root.Values.ports.rendezvous }}
{{- end }}
{{ include "baton.commonFlags" . }}
{{- end -}}

{{/* The pod's own requests, with its GPUs and network cards. */}}
{{- define "baton.workerResources" -}}
{{- $resources := deepCopy .one.resources -}}
{{- range $device := list .one.gpu .one.rdma -}}
{{- if gt (int $device.count) 0 -}}
{{- $_ := set $resources "limits" (merge (dict $device.resource (int $device.count)) (default (dict) $resources.limits)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "baton.workerPod" -}}
{{- $v := .root.Values -}}
{{- $image := include "baton.image" (dict "root" .root "image" $v.image.worker) -}}
{{- $again := and (not .part) (gt (int (include "baton.ranks" .one)) 1) -}}
metadata:
  {{- include "baton.podMetadata" (merge (dict "component" .side) .) | nindent 2 }}
spec:
  {{- include "baton.podSpec" (merge (dict "hooksSeconds" 0) .) | nindent 2 }}
  {{- if or .one.topologySpreadConstraints (not .part) }}
  {{- include "baton.spread" . | nindent 2 }}
  {{- end }}
  {{- with include "baton.download" (dict "root" .root "one" .one "image" $image "component" .component) }}
  {{- . | nindent 2 }}
  {{- end }}
  containers:
    - name: {{ .side }}
      image: {{ $image }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      args:
        {{- include "baton.workerFlags" . | nindent 8 }}
      env:
        {{- include "baton.env" . | nindent 8 }}
        # Where UCX listens over TCP: without it any port.
        - {name: UCX_TCP_PORT_RANGE, value: "{{ $v.ports.dataFirst }}-{{ $v.ports.dataLast }}"}
        {{- with .one.rdma.netDevices }}
        - {name: UCX_NET_DEVICES, value: {{ . | quote }}}
        {{- end }}
      ports:
        {{- if ne .part "follower" }}
        - {name: grpc, containerPort: {{ $v.ports.worker }}}
        {{- end }}
        - {name: metrics, containerPort: {{ $v.ports.metrics }}}
        {{- if eq .side "both" }}
        - {name: prefill-grpc, containerPort: {{ $v.ports.prefillWorker }}}
        - {name: prefill-metrics, containerPort: {{ $v.ports.prefillMetrics }}}
        {{- end }}
      # Loaded, and a turn taken: its own affair alone, so that it is not restarted for what others are late with.
      startupProbe:
        httpGet: {path: /started, port: metrics}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add .one.startupSeconds 4) 5 }}
      # Turns go on.
      livenessProbe:
        httpGet: {path: /health, port: metrics}
        periodSeconds: 10
        timeoutSeconds: 5
        # A pod with all ranks of a worker starts them again itself, and nothing answers until they are up.
        failureThreshold: {{ $again | ternary 12 6 }}
      # It holds a lease, and a canary hand-over has passed through it.
      readinessProbe:
        httpGet: {path: /ready, port: metrics}
        periodSeconds: 5
        timeoutSeconds: 3
        failureThreshold: 2
      resources:
        {{- include "baton.workerResources" . | nindent 8 }}
      securityContext:
        {{- include "baton.containerSecurity" . | nindent 8 }}
          {{- if .one.rdma.ipcLock }}
          add: [IPC_LOCK]
          {{- end }}
      volumeMounts:
        {{- include "baton.mounts" . | nindent 8 }}
        - {name: shm, mountPath: /dev/shm}
  volumes:
    {{- include "baton.volumes" . | nindent 4 }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ .one.sharedMemory }}}
{{- end -}}

{{/* What a LeaderWorkerSet of this side is made of: dict root, side, one, security. Its spec, also within a
DisaggregatedSet. */}}
{{- define "baton.groups" -}}
{{- if eq .one.autoscaling.kind "none" }}
replicas: {{ .one.replicas }}
{{- end }}
startupPolicy: LeaderCreated
rolloutStrategy:
  type: RollingUpdate
  rollingUpdateConfiguration:
    maxSurge: {{ .one.rollout.maxSurge }}
    maxUnavailable: {{ .one.rollout.maxUnavailable }}
leaderWorkerTemplate:
  # A rank that ends takes its group with it: all are started again, after all have ended.
  restartPolicy: RecreateGroupOnPodRestart
  {{- if include "baton.grouped" .one }}
  size: {{ .one.pods }}
  leaderTemplate:
    {{- include "baton.workerPod" (merge (dict "part" "leader") .) | nindent 4 }}
  workerTemplate:
    {{- include "baton.workerPod" (merge (dict "part" "follower") .) | nindent 4 }}
  {{- else }}
  size: 1
  workerTemplate:
    {{- include "baton.workerPod" (merge (dict "part" "") .) | nindent 4 }}
  {{- end }}
{{- end -}}
