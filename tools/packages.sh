#!/usr/bin/env bash
# List the packages of Debian and Ubuntu that building and testing everything needs and this machine lacks, one in a
# line. packages.sh --install installs them, as root or by sudo: one by one, so that a package that a mirror lacks
# costs no other.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Which Java there is depends on the distribution.
java_package() {
  local version
  for version in 17 21 25; do
    if apt-cache show "openjdk-$version-jre-headless" >/dev/null 2>&1; then
      echo "openjdk-$version-jre-headless"
      return
    fi
  done
  echo openjdk-17-jre-headless
}

missing() {
  python3 -c 'import ensurepip' 2>/dev/null || printf '%s\n' python3 python3-venv
  command -v c++ >/dev/null || echo g++
  command -v make >/dev/null || echo make
  tools/check_java.sh 2>/dev/null || java_package
  command -v ip >/dev/null || echo iproute2 # hosts of the tests are network namespaces
  [[ -x /usr/sbin/sshd ]] || printf '%s\n' openssh-server openssh-client # tests start ranks on other hosts
  command -v mpirun.openmpi >/dev/null || echo openmpi-bin # tests start their programs below both
  command -v mpiexec.hydra >/dev/null || echo mpich
  [[ -x /usr/sbin/slurmctld ]] || printf '%s\n' slurm-wlm munge # tests start a Slurm of two nodes
  # The oldest compilers that README promises; a distribution may have dropped them.
  command -v g++-11 >/dev/null || echo g++-11
  command -v clang++-16 >/dev/null || echo clang-16
  # Native tests for aarch64.
  command -v qemu-aarch64 >/dev/null || echo qemu-user
  [[ -e /usr/aarch64-linux-gnu/lib/libc.so.6 ]] || echo libc6-arm64-cross
}

if [[ ${1:-} != --install ]]; then
  missing
  exit
fi
as_root=()
if [[ $(id -u) != 0 ]]; then as_root=(sudo); fi
if [[ -z $(missing) ]]; then exit 0; fi
"${as_root[@]}" apt-get update -q -o Acquire::http::Timeout=30
mapfile -t packages < <(missing)
echo "packages: installing ${packages[*]}"
for each in "${packages[@]}"; do
  "${as_root[@]}" apt-get install -q -y --no-install-recommends "$each" || echo "packages: could not install $each" >&2
done
