{{- define "turnwire.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "turnwire.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "turnwire.labels" -}}
{{ include "turnwire.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "turnwire.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "turnwire.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "turnwire.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* A quantity such as 512Mi or 2Gi as a number of mebibytes. */}}
{{- define "turnwire.mebibytes" -}}
{{- $number := regexFind "^[0-9]+" . | int64 -}}
{{- if hasSuffix "Gi" . -}}{{ mul $number 1024 }}{{- else -}}{{ $number }}{{- end -}}
{{- end -}}

{{/* A setting's value as text; a number such as 1048576 without an exponent, a list with commas. */}}
{{- define "turnwire.text" -}}
{{- if kindIs "slice" . -}}{{ join "," . }}
{{- else if and (kindIs "float64" .) (eq (floor .) .) -}}{{ int64 . }}
{{- else -}}{{ . }}
{{- end -}}
{{- end -}}

{{/* The securityContext of every container: what the "restricted" pod security standard asks. */}}
{{- define "turnwire.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Refuse values that contradict each other. Renders nothing. */}}
{{- define "turnwire.check" -}}
{{- $end := .Values.shutdown -}}
{{- $needed := add $end.preStopSeconds $end.drainSeconds 5 | int64 -}}
{{- if lt ($end.terminationGracePeriodSeconds | int64) $needed -}}
{{- fail (printf "shutdown.terminationGracePeriodSeconds is %d, but preStopSeconds + drainSeconds + 5 is %d: turns would be cut off" ($end.terminationGracePeriodSeconds | int64) $needed) -}}
{{- end -}}
{{- $memory := .Values.memory -}}
{{- $limit := include "turnwire.mebibytes" $memory.limit | int64 -}}
{{- $chains := include "turnwire.mebibytes" $memory.chains | int64 -}}
{{- $bodies := include "turnwire.mebibytes" $memory.bodies | int64 -}}
{{- $held := add $chains (mul 2 $bodies) 256 | int64 -}}
{{- if lt $limit $held -}}
{{- fail (printf "memory.limit is %dMi, but chains + 2 x bodies + 256Mi is %dMi: the pod would be killed under load" $limit $held) -}}
{{- end -}}
{{- if gt (include "turnwire.mebibytes" $memory.request | int64) $limit -}}
{{- fail "memory.request is above memory.limit" -}}
{{- end -}}
{{- if and (lt $bodies 128) (not (hasKey .Values.settings "limits.max_decoded_body_bytes")) -}}
{{- fail (printf "memory.bodies is %dMi, but one body may have 128Mi: raise it, or lower settings.limits.max_decoded_body_bytes" $bodies) -}}
{{- end -}}
{{- with .Values.autoscaling -}}
{{- if and .enabled (gt (.minReplicas | int64) (.maxReplicas | int64)) -}}
{{- fail (printf "autoscaling.minReplicas is %d, above maxReplicas %d" (.minReplicas | int64) (.maxReplicas | int64)) -}}
{{- end -}}
{{- end -}}
{{- if eq (.Values.service.port | int64) (.Values.service.adminPort | int64) -}}
{{- fail "service.port and service.adminPort are the same" -}}
{{- end -}}
{{- end -}}
