#!/usr/bin/env bash
# Check for a Java that Spark 4 runs on. Print nothing if there is one; else print what to install, and exit with 1.
set -euo pipefail

readonly LEAST=17
readonly REMEDY="Spark needs Java $LEAST or newer: install it (Debian, Ubuntu: apt-get install openjdk-17-jre-headless; macOS: brew install openjdk@17) or point JAVA_HOME to it."

if [[ -n "${JAVA_HOME:-}" ]]; then
  java="$JAVA_HOME/bin/java"
  if [[ ! -x "$java" ]]; then
    echo "JAVA_HOME is $JAVA_HOME, but there is no bin/java in it. $REMEDY" >&2
    exit 1
  fi
elif ! java=$(command -v java); then
  echo "There is no java on PATH, and JAVA_HOME is not set. $REMEDY" >&2
  exit 1
fi

# The first line with a version in quotes: 'openjdk version "17.0.15" 2025-04-15'. Java 8 calls itself "1.8.0".
if ! output=$("$java" -version 2>&1); then
  echo "$java does not run. $REMEDY" >&2
  exit 1
fi
version=$(sed -n 's/.*version "\(1\.\)\{0,1\}\([0-9]*\).*/\2/p' <<<"$output" | head -n 1)
if [[ -z "$version" ]]; then
  echo "$java does not say its version. $REMEDY" >&2
  exit 1
fi
if ((version < LEAST)); then
  echo "$java is Java $version. $REMEDY" >&2
  exit 1
fi
