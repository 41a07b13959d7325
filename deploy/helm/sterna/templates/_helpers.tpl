{{/* The name of what belongs to a model: (list $ $model). */}}
{{- define "sterna.name" -}}
{{- $root := index . 0 -}}{{- $model := index . 1 -}}
{{- printf "%s-%s" $root.Release.Name $model.name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* The labels by which a model's pod is found. */}}
{{- define "sterna.selector" -}}
{{- $root := index . 0 -}}{{- $model := index . 1 -}}
app.kubernetes.io/name: sterna
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ $model.name }}
{{- end -}}

{{- define "sterna.labels" -}}
{{- $root := index . 0 -}}
{{ include "sterna.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end -}}

{{/* The GPUs of a pod: those of all instances that it may have. */}}
{{- define "sterna.gpus" -}}
{{- mul (int .requestGPU) (int (default .replicaCount .maxReplicaCount)) -}}
{{- end -}}
