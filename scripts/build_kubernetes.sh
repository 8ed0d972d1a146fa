#!/usr/bin/env bash
# Builds a Kubernetes 1.20.2 out of Debian 12's source package, for the tests of the real cluster.
# Installs what that needs (as root); keeps the four programs in ~/.cache/perdure; 8 minutes of two cores, once.
set -euo pipefail
PARTS="kube-apiserver kube-controller-manager kube-scheduler kubelet"
keep="${XDG_CACHE_HOME:-$HOME/.cache}/perdure/k8s-1.20.2"
say() { printf 'kubernetes: %s\n' "$*"; }

sudo=""; [ "$(id -u)" = 0 ] || sudo="sudo -n"
need() { # PROGRAM=PACKAGE ...: installs the packages whose program is missing.
  local pair missing=""
  for pair in "$@"; do PATH="$PATH:/usr/sbin:/usr/lib/cni" command -v "${pair%=*}" >/dev/null || missing="$missing ${pair#*=}"; done
  [ -n "$missing" ] || return 0
  say "installing$missing"
  { $sudo apt-get update -qq && $sudo apt-get install -y -qq --no-install-recommends $missing; } >/dev/null
}
need etcd=etcd-server containerd=containerd runc=runc bridge=containernetworking-plugins \
  busybox=busybox-static iptables=iptables ip=iproute2 kubectl=kubernetes-client buildah=buildah debootstrap=debootstrap
[ -d /usr/lib/cni ] || { $sudo apt-get install -y -qq --no-install-recommends containernetworking-plugins >/dev/null; }
if [ -x "$keep/kubelet" ]; then exit 0; fi

need go=golang-go make=make rsync=rsync gcc=gcc jq=jq
reflect=/usr/share/gocode/src/github.com/modern-go/reflect2
[ -d "$reflect" ] || $sudo apt-get install -y -qq --no-install-recommends golang-github-modern-go-reflect2-dev >/dev/null
mkdir -p "$(dirname "$keep")"
exec 9>"$keep.lock"; flock 9 # Two that build at once would take twice as long.
if [ -x "$keep/kubelet" ]; then exit 0; fi

work="$(mktemp -d "$(dirname "$keep")/k8s-build.XXXXXX")" # 3 GB while it builds.
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
cd "$work"
say "fetching Debian's source package"
mkdir -p apt/parts apt/lists/partial
sed 's/^Types: deb$/Types: deb-src/' /etc/apt/sources.list.d/debian.sources >apt/parts/source.sources 2>/dev/null ||
  sed -n 's/^deb /deb-src /p' /etc/apt/sources.list >apt/parts/source.list
options="-oDir::Etc::sourcelist=/dev/null -oDir::Etc::sourceparts=$work/apt/parts -oDir::State::Lists=$work/apt/lists -oAPT::Sandbox::User=root"
apt-get $options update -qq
apt-get $options source --download-only -qq 'kubernetes=1.20.5+really1.20.2*' >/dev/null 2>&1 ||
  apt-get $options source --download-only -qq kubernetes >/dev/null
tar xzf kubernetes_*.orig.tar.gz
source="$(echo "$work"/kubernetes-1.20.*)"

# Its reflect2 reads maps in a way that Go 1.18 broke: the API server dies after minutes. Debian's own is mended.
vendored="$source/vendor/github.com/modern-go/reflect2"
rm -f "$vendored"/*.go "$vendored"/*.s
cp "$reflect"/*.go "$reflect"/*.s "$vendored/"
rm -f "$vendored"/*_test.go

mkdir -p gopath/src/k8s.io home
ln -sfn "$source" gopath/src/k8s.io/kubernetes
cd gopath/src/k8s.io/kubernetes
say "building $PARTS (8 minutes of two cores; once)"
env HOME="$work/home" GOPATH="$work/gopath" GOCACHE="$work/gocache" CGO_ENABLED=0 \
  nice -n 19 make WHAT="$(printf 'cmd/%s ' $PARTS)" GOLDFLAGS="-s -w" >"$work/build.log" 2>&1 ||
  { tail -20 "$work/build.log" >&2; exit 1; }
mkdir "$work/made"
for part in $PARTS; do cp "_output/local/bin/linux/amd64/$part" "$work/made/"; done
mv "$work/made" "$keep"
say "built $(ls "$keep" | wc -l) programs in $keep"
