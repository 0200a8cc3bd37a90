#!/usr/bin/env bash
# Builds the Dockerfile where no image registry can be reached, and runs what comes of it.
#
#   apt-get install debootstrap buildah && bash deploy/image/try.sh
#
# The two base images are stand-ins of Debian's own packages: one with Python and pip to build in,
# and one with what distroless puts into its Python image, which is to say no shell. What is built is
# run as a container runtime would run it: its root read-only, uid 65532, no capability, no way to
# get one, its environment alone. Needs root, Debian's mirror and PyPI; takes two minutes.
set -euo pipefail
cd "$(dirname "$0")/../.."

work=$(mktemp -d)
export CONTAINERS_STORAGE_CONF=$work/storage.conf BUILDAH_ISOLATION=chroot
printf '[storage]\ndriver = "vfs"\nrunroot = "%s/run"\ngraphroot = "%s/graph"\n' "$work" "$work" \
  >"$CONTAINERS_STORAGE_CONF"

running=()
clean() {
  for each in "${running[@]}"; do kill "$each" 2>/dev/null || true; done
  buildah rm -a >/dev/null 2>&1 || true
  rm -rf --one-file-system "$work"
}
trap clean EXIT

say() { printf '\n== %s\n' "$*"; }

say "a system to build in"
debootstrap --variant=minbase --include=python3,python3-pip,python3-venv,ca-certificates \
  trixie "$work/build" http://deb.debian.org/debian >"$work/log"
chroot "$work/build" python3 -m venv /usr/local # as python:3.13-slim has it: in /usr/local
for file in /etc/resolv.conf /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do
  if [[ -e $file ]]; then cp "$file" "$work/build$file"; fi
done

say "a system to run on"
mkdir "$work/build/debs" "$work/runtime"
wanted='^(lib|tzdata|netbase|python3.13-minimal|gcc-14-base|media-types|base-files|zlib1g)'
chroot "$work/build" sh -c 'cd /debs && apt-get update -q && apt-get download -q $(apt-cache depends \
  --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances \
  libpython3.13-stdlib python3.13-minimal libffi8 libstdc++6 tzdata netbase |
  grep -E "'"$wanted"'" | grep -vE "libpam|libdebconf|libaudit|libselinux|libsystemd" | sort -u)' \
  >>"$work/log" 2>&1
for package in "$work"/build/debs/*.deb; do dpkg -x "$package" "$work/runtime"; done
for name in bin sbin lib lib64; do # /usr merged, as it is in Debian 13
  place=$work/runtime/$name
  mkdir -p "$work/runtime/usr/$name"
  if [[ -d $place && ! -L $place ]]; then cp -a "$place/." "$work/runtime/usr/$name/" && rm -r "$place"; fi
  ln -sfn "usr/$name" "$place"
done
mkdir -p "$work/runtime/etc/ssl/certs" "$work/runtime/proc" "$work/runtime/dev" "$work/runtime/tmp"
cp "$work/build/etc/ssl/certs/ca-certificates.crt" "$work/runtime/etc/ssl/certs/"
ln -sf python3.13 "$work/runtime/usr/bin/python3"
rm -r "$work/build/debs"

image() { # makes an image NAME of a FOLDER
  local container
  container=$(buildah from scratch)
  cp -a "$2/." "$(buildah mount "$container")/"
  buildah config --env PATH=/usr/local/bin:/usr/bin:/bin "$container"
  buildah commit -q --rm "$container" "$1" >/dev/null
}
image localhost/build:stand-in "$work/build"
image localhost/runtime:stand-in "$work/runtime"

say "the image"
buildah bud --format docker --build-arg BUILD_IMAGE=localhost/build:stand-in \
  --build-arg RUNTIME_IMAGE=localhost/runtime:stand-in -t localhost/turnwire:tried . >>"$work/log"
buildah images localhost/turnwire:tried
container=$(buildah from localhost/turnwire:tried)
root=$(buildah mount "$container")

# Runs a command in the image. (Not a function: in the background that would be another process.)
inside=(
  unshare -m bash -c 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" &&
    mount -t proc proc "$0/proc" && mount --bind /dev "$0/dev" &&
    exec env -i PATH=/usr/local/bin:/usr/bin:/bin TURNWIRE_HOST=127.0.0.1 TURNWIRE_ADMIN_HOST=127.0.0.1 \
      TURNWIRE_LOG_FORMAT=json SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt \
      setpriv --no-new-privs --bounding-set=-all,+sys_chroot,+setuid,+setgid --inh-caps=-all \
      /usr/sbin/chroot --userspec=65532:65532 --groups= "$0" "$@"' "$root"
)

say "what it is"
"${inside[@]}" /usr/local/bin/turnwire version
"${inside[@]}" /usr/bin/python3.13 -c '
import os, proxy.app, ssl
assert (os.getuid(), os.getgid(), os.getgroups()) == (65532, 65532, [])
try:
    open("/tmp/x", "w")
except OSError as error:
    print("writing:", error.strerror)
else:
    raise SystemExit("the root can be written")
assert proxy.app.__spec__.cached and os.path.exists(proxy.app.__spec__.cached)
print("certificates:", len(ssl.create_default_context().get_ca_certs()))
'
if "${inside[@]}" /bin/sh -c true 2>/dev/null; then echo "there is a shell" && exit 1; fi
echo "no shell"

say "how it serves, and ends"
"${inside[@]}" /usr/local/bin/turnwire simulate --port 18790 &
upstream=$!
running+=("$upstream")
"${inside[@]}" /usr/local/bin/turnwire serve --upstream http://127.0.0.1:18790/v1 --port 18787 --admin-port 18788 &
proxy=$!
running+=("$proxy")
"${inside[@]}" /usr/local/bin/turnwire health --admin-port 18788 --wait 30
"${inside[@]}" /usr/bin/python3.13 -c '
import json, urllib.request
body = json.dumps({"model": "m", "input": "Hello.", "store": False}).encode()
headers = {"Authorization": "Bearer sk-x", "Content-Type": "application/json"}
request = urllib.request.Request("http://127.0.0.1:18787/v1/responses", body, headers)
with urllib.request.urlopen(request) as reply:
    print(reply.status, reply.headers["turnwire-mode"], reply.headers["turnwire-reason"])
'
kill "$proxy" && wait "$proxy" && echo "ended with 0"
kill "$upstream" && wait "$upstream"
if "${inside[@]}" /usr/local/bin/turnwire health --admin-port 18788; then exit 1; fi

say "all well"
