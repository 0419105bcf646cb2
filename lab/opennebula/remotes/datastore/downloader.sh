#!/bin/sh
# Stands in for OpenNebula's downloader: downloader.sh [options] SOURCE TARGET|-
# Sources are http(s) and file addresses and paths. --md5 and --sha1 are checked when all has been written; compressed
# files are unpacked unless --nodecomp; --max-size is the number of bytes to give at most; --limit is ignored.
set -u

fail() {
  echo "$*" >&2
  exit 255
}

options=$(getopt -o m:s:l:c:no -l md5:,sha1:,limit:,max-size:,nodecomp,noretry -- "$@") || fail "Arguments error"
eval set -- "$options"
tool='' wanted='' decompress=yes most=''
while [ "$1" != -- ]; do
  case $1 in
    -m | --md5) tool=md5sum wanted=$2 ; shift ;;
    -s | --sha1) tool=sha1sum wanted=$2 ; shift ;;
    -c | --max-size) most=$2 ; shift ;;
    -l | --limit) shift ;;
    -n | --nodecomp) decompress=no ;;
  esac
  shift
done
shift
source=$1 target=$2
[ -z "$wanted" ] || [ -z "$most" ] || fail "Hash check not supported for partial downloads"

scratch=$(mktemp -d) || exit 255
trap 'rm -rf "$scratch"' EXIT

give() {
  case $source in
    http://* | https://*) curl --fail --silent --show-error --location --insecure "$source" ;;
    file://*) cat "${source#file://}" ;;
    *) cat "$source" ;;
  esac
}

unpack() {
  case $decompress$(give 2>/dev/null | head -c 6 | od -An -tx1 | tr -d ' ') in
    yes1f8b*) gzip -dc ;;
    yes425a68*) bzip2 -dc ;;
    yesfd377a585a00) xz -dc ;;
    *) cat ;;
  esac
}

case $source in
  http://* | https://*) ;;
  *) [ -r "${source#file://}" ] || fail "Cannot read from $source" ;;
esac

copy() {
  mkfifo "$scratch/tee"
  ${tool:-cat} <"$scratch/tee" >"$scratch/digest" &
  { give || touch "$scratch/failed"; } | if [ -n "$tool" ]; then tee "$scratch/tee"; else cat; fi | unpack
  [ -n "$tool" ] || : >"$scratch/tee"
  wait
}

if [ -n "$most" ]; then
  { give || touch "$scratch/failed"; } 2>/dev/null | unpack 2>/dev/null | head -c "$most"
  exit 0
fi
if [ "$target" = - ]; then copy; else copy >"$target"; fi || fail "Error copying"
[ ! -e "$scratch/failed" ] || fail "Error copying"
[ -z "$tool" ] || [ "$(cut -d' ' -f1 "$scratch/digest")" = "$wanted" ] || fail "Hash does not match"
