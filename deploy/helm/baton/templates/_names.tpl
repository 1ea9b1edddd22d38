{{/* What is everything called, and what is refused? */}}

{{- define "baton.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Short enough for the longest suffix, and for the names that a LeaderWorkerSet makes of it. */}}
{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "baton.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "baton.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "baton.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "baton.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Which pods: dict root, component. Part of what cannot be changed later. */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ include "baton.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Which kinds of workers there are, as JSON. */}}
{{- define "baton.workers" -}}
{{- $kinds := list "prefill" "decode" -}}
{{- if or (gt (int .Values.both.replicas) 0) (ne .Values.both.autoscaling.kind "none") -}}{{- $kinds = append $kinds "both" -}}{{- end -}}
{{- toJson $kinds -}}
{{- end -}}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: baton
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* Of the API's Service: what clients take for https or http, if nothing is said. */}}
{{- define "baton.servicePort" -}}
{{- default (hasKey (fromYaml (include "baton.security" .)) "http" | ternary 443 80) .Values.service.port -}}
{{- end -}}

{{/* dict root, image. */}}
{{- define "baton.image" -}}
{{- $name := .image.repository -}}
{{- if .root.Values.image.registry -}}{{- $name = printf "%s/%s" (trimSuffix "/" .root.Values.image.registry) $name -}}{{- end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $name .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (default .root.Chart.AppVersion .image.tag) -}}
{{- end -}}
{{- end -}}

{{/* "off" in YAML without quotes is the boolean false. */}}
{{- define "baton.off" -}}
{{- if kindIs "bool" . -}}{{- not . | ternary "off" "" -}}{{- else if kindIs "string" . -}}{{- eq . "off" | ternary "off" "" -}}{{- end -}}
{{- end -}}

{{/* What was chosen of keys and TLS, as YAML: apiKeys, adminKeys, reasoningKey, grpc, http, each with its Secrets or absent. Fails where nothing was. */}}
{{- define "baton.security" -}}
{{- $keys := .Values.security.apiKeys -}}
{{- $tls := .Values.security.tls -}}
{{- if and (not (kindIs "map" $keys)) (not (include "baton.off" $keys)) -}}
{{- fail "security.apiKeys must be said: {secretName: …, key: …} of a Secret with a key for each line, or \"off\" if everybody who reaches the API may use it" -}}
{{- end -}}
{{- if and (not (kindIs "map" $tls)) (not (include "baton.off" $tls)) -}}
{{- fail "security.tls must be said: {grpc: {bootstrap: …, prefill: …, decode: …}, http: {secretName: …}}, each of the two or the whole also \"off\"" -}}
{{- end -}}
{{- if kindIs "map" $tls -}}
{{- range $part := list "grpc" "http" -}}
{{- $one := get $tls $part -}}
{{- if and (not (kindIs "map" $one)) (not (include "baton.off" $one)) -}}
{{- fail (printf "security.tls.%s must be said: names of Secrets or \"off\"" $part) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $chosen := dict -}}
{{- if kindIs "map" $keys -}}{{- $_ := set $chosen "apiKeys" (dict "secretName" $keys.secretName "key" (default "keys" $keys.key)) -}}{{- end -}}
{{- range $name, $key := dict "adminKeys" "keys" "reasoningKey" "key" -}}
{{- with get $.Values.security $name -}}{{- if kindIs "map" . -}}{{- $_ := set $chosen $name (dict "secretName" .secretName "key" (default $key .key)) -}}{{- end -}}{{- end -}}
{{- end -}}
{{- if and (gt (int .Values.bootstrap.replicas) 1) (not (hasKey $chosen "reasoningKey")) -}}
{{- fail "security.reasoningKey must be said where bootstrap.replicas is more than 1: {secretName: …, key: …} of a Secret whose key all bootstraps have, so that each continues the streams of another" -}}
{{- end -}}
{{- if kindIs "map" $tls -}}
{{- range $part := list "grpc" "http" -}}
{{- $one := get $tls $part -}}
{{- if kindIs "map" $one -}}{{- $_ := set $chosen $part $one -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $chosen -}}
{{- end -}}
