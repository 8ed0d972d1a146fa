"""Which fields there are, and in which shape their values: what a schema would say of a manifest.

Only of the objects that a training job consists of. The names are those of the API 1.37.
"""

import re

QUANTITY = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?")
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
SERVICE = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
"""What a Service may be called until 1.34; later also with a digit in front."""
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_SUFFIXES = {
    **{"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3},
    **{letter: 1e3 ** (n + 2) for n, letter in enumerate("MGTPE")},
    **{f"{letter}i": 1024.0 ** (n + 1) for n, letter in enumerate("KMGTPE")},
}


def read_quantity(value: object) -> float | None:
    """Return a quantity such as `1.5Gi` or `500m` as a number; None where it is none.

    >>> read_quantity("2Ki"), read_quantity("500m"), read_quantity("10GB")
    (2048.0, 0.5, None)
    """
    text = str(value)
    match = QUANTITY.fullmatch(text)
    if match is None or isinstance(value, bool):
        return None
    suffix = match[3] or ""
    if suffix[:1] in "eE" and len(suffix) > 1 and suffix[1] != "i":
        return float(text)
    return float(text.removesuffix(suffix)) * _SUFFIXES[suffix]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TOP = _words("apiVersion kind metadata spec status data binaryData immutable type stringData")
METADATA = _words(
    "name namespace labels annotations generateName finalizers ownerReferences uid "
    "resourceVersion generation creationTimestamp managedFields deletionTimestamp "
    "deletionGracePeriodSeconds selfLink"
)
JOB = _words(
    "parallelism completions activeDeadlineSeconds podFailurePolicy successPolicy backoffLimit "
    "backoffLimitPerIndex maxFailedIndexes selector manualSelector template "
    "ttlSecondsAfterFinished completionMode suspend podReplacementPolicy managedBy scheduling"
)
PYTORCHJOB = _words("runPolicy pytorchReplicaSpecs elasticPolicy nprocPerNode")
RUN_POLICY = _words(
    "cleanPodPolicy ttlSecondsAfterFinished activeDeadlineSeconds backoffLimit schedulingPolicy "
    "suspend managedBy"
)
REPLICA = _words("replicas template restartPolicy")
"""Fields of a PyTorchJob (kubeflow.org/v1, Training Operator 1.9.3)."""
COUNTS = (
    "parallelism",
    "completions",
    "backoffLimit",
    "activeDeadlineSeconds",
    "ttlSecondsAfterFinished",
)
"""Fields of a Job that are numbers from 0 on."""
POD = _words(
    "volumes initContainers containers ephemeralContainers restartPolicy "
    "terminationGracePeriodSeconds activeDeadlineSeconds dnsPolicy nodeSelector "
    "serviceAccountName serviceAccount automountServiceAccountToken nodeName hostNetwork hostPID "
    "hostIPC shareProcessNamespace securityContext imagePullSecrets hostname subdomain affinity "
    "schedulerName tolerations hostAliases priorityClassName priority dnsConfig readinessGates "
    "runtimeClassName enableServiceLinks preemptionPolicy overhead topologySpreadConstraints "
    "setHostnameAsFQDN os hostUsers schedulingGates resourceClaims resources hostnameOverride "
    "schedulingGroup evictionResponders"
)
SWITCHES = _words(
    "hostNetwork hostPID hostIPC shareProcessNamespace automountServiceAccountToken "
    "enableServiceLinks setHostnameAsFQDN hostUsers"
)
"""Fields of a pod that are true or false."""
KINDS = {
    name.lower(): name
    for name in ("Job", "JobSet", "TrainJob", "TrainingRuntime", "PyTorchJob", "ConfigMap",
                 "Service", "Secret", "PersistentVolumeClaim")
}  # fmt: skip
CONTAINER = _words(
    "name image command args workingDir ports envFrom env resources resizePolicy restartPolicy "
    "restartPolicyRules volumeMounts volumeDevices livenessProbe readinessProbe startupProbe "
    "lifecycle terminationMessagePath terminationMessagePolicy imagePullPolicy securityContext "
    "stdin stdinOnce tty"
)
RESOURCES = _words("limits requests claims")
MOUNT = _words(
    "name mountPath readOnly subPath subPathExpr mountPropagation recursiveReadOnly "
    "bindMountOptions"
)
ENV = _words("name value valueFrom")
VALUE_FROM = _words("fieldRef resourceFieldRef configMapKeyRef secretKeyRef fileKeyRef")
VOLUME = _words(
    "name persistentVolumeClaim configMap secret emptyDir hostPath nfs csi ephemeral projected "
    "downwardAPI image iscsi cephfs rbd fc azureFile azureDisk gcePersistentDisk "
    "awsElasticBlockStore glusterfs cinder flexVolume flocker portworxVolume quobyte scaleIO "
    "storageos vsphereVolume photonPersistentDisk gitRepo"
)
TOLERATION = _words("key operator value effect tolerationSeconds")
CLAIM = _words(
    "accessModes resources storageClassName volumeName volumeMode selector dataSource "
    "dataSourceRef volumeAttributesClassName"
)

SINCE: dict[str, tuple[int, int]] = {
    "ttlSecondsAfterFinished": (1, 21),
    "completionMode": (1, 22),
    "suspend": (1, 22),
    "podFailurePolicy": (1, 26),
    "backoffLimitPerIndex": (1, 29),
    "maxFailedIndexes": (1, 29),
    "podReplacementPolicy": (1, 29),
    "successPolicy": (1, 31),
    "managedBy": (1, 32),
}
"""Field of a Job -> server from which it is on by default. One before it drops the field without
a word, or does not know it."""
MODES = _words("ReadWriteOnce ReadOnlyMany ReadWriteMany ReadWriteOncePod")
EFFECTS = _words("NoSchedule PreferNoSchedule NoExecute")
