# What is done on a host: run there as  sh -c "$(cat host.sh)" virtman WAIT COMMAND ACTION ARGUMENT...
# WAIT: seconds to wait for an earlier action with the same disk; COMMAND: virtman's. Each action can be repeated.
# shellcheck shell=sh

set -u
export LC_ALL=C
# The host's agent, and not one of the user's own.
export VIRTMAN_SOCKET="${VIRTMAN_SOCKET:-/run/virtman/agent.sock}"
wait=$1 virtman=$2 action=$3
shift 3

fail() {
    printf '%s\n' "$*" >&2
    exit 1
}

command -v "$virtman" >/dev/null || fail "virtman is not installed there: no command $virtman"

# at_end: what an action does before it gives its lock back.
at_end() { :; }

# lock FOLDER KEY: one action with a disk at a time. OpenNebula cancels actions without ending their scripts.
lock() {
    mkdir -p "$1" || exit
    held=$1/$2.lock
    while :; do
        exec 9>"$held" || exit
        flock -w "$wait" 9 || fail "an earlier action with it still goes on there, after $wait seconds"
        # Whoever gives the lock back removes the file before.
        # shellcheck disable=SC3013
        [ "$held" -ef /proc/self/fd/9 ] && break
    done
    trap 'at_end; rm -f "$held"' EXIT
}

# end_others LOCK: ends the actions that have this lock, or wait for it, with all that they run. sshd gives each action
# a process group of its own.
end_others() {
    # While dash runs something that does not get the lock, its own descriptor of the file has another number.
    # By its name first: to look at all open files would wait for those of a file server that hangs.
    find /proc/[0-9]*/fd -lname "*/${1##*/}" 2>/dev/null | while read -r open; do
        # shellcheck disable=SC3013
        [ "$1" -ef "$open" ] || continue
        # PID (NAME) STATE PARENT GROUP and more, where the name may have blanks.
        group=$(sed 's/.*) . [0-9]* \([0-9]*\) .*/\1/' "${open%/fd/*}/stat" 2>/dev/null)
        [ -z "$group" ] || kill -s TERM -- "-$group" 2>/dev/null
    done
}

# v ARGUMENT...: virtman, which does not keep the lock if it outlives us.
v() {
    "$virtman" "$@" 9>&-
}

# Exit code of virtman for a name of what is not there.
absent=3

# gone ARGUMENT...: virtman, for which what is not there is fine.
gone() {
    said=$(v "$@" 2>&1 >/dev/null)
    code=$?
    [ "$code" -eq 0 ] || [ "$code" -eq "$absent" ] || fail "$said"
}

# link LINK TARGET: in one step, whatever is there.
link() {
    mkdir -p "$(dirname "$1")" && ln -sfn "$2" "$1.new" && mv -fT "$1.new" "$1" || exit
}

# fits NAME PATH FORMAT: the disk is what OpenNebula will tell libvirt that it is.
fits() {
    if [ -b "$2" ]; then kind=raw; else kind=qcow2; fi
    [ "$kind" = "$3" ] && return
    v destroy "$1"
    fail "its stack makes disks of format $kind, and the image has format $3: set DRIVER and DISK_TYPE of the datastore"
}

# monitored LINK DRIVER: OpenNebula's probe reports the room in a system datastore that has this file, by the driver in
# it. Ours has a folder instead, and our own probe.
monitored() {
    store=$(dirname "$(dirname "$1")")
    if [ -z "$2" ]; then
        mkdir -p "$store/.virtman" || exit
    elif [ "$(cat "$store/.monitor" 2>/dev/null)" != "$2" ]; then
        printf '%s\n' "$2" >"$store/.monitor" || exit
    fi
}

# path NAME: of a disk that is there.
path() {
    shown=$(v show "$1" --json) || return
    printf '%s\n' "$shown" | sed -n 's/^    "path": "\(.*\)",$/\1/p'
}

# whole FILE: a backup came to its end.
whole() {
    qemu-img check -f qcow2 "$1" >/dev/null 2>&1 || fail "what came is no whole backup"
}

case $action in

create) # FOLDER KEY LINK NAME IMAGE SIZE FORMAT MONITOR FRESH: SIZE, MONITOR and FRESH may be empty
    lock "$1" "$2"
    made=$(v create "$4" "$5" ${6:+--size "$6"} ${9:+--replace}) || exit
    fits "$4" "$made" "$7"
    link "$3" "$made"
    monitored "$3" "$8"
    ;;

describe) # NAME: its description and those of its snapshots, or nothing
    shown=$(v show "$1" --json 2>&1)
    code=$?
    [ "$code" -ne "$absent" ] || exit 0
    [ "$code" -eq 0 ] || fail "$shown"
    printf '%s\n' "$shown"
    v snapshot list "$1" --json || exit
    ;;

send) # FOLDER KEY NAME OPTION...
    lock "$1" "$2"
    name=$3
    shift 3
    v send "$name" "$@" || exit
    ;;

forward) # FOLDER KEY HOST COMMAND NAME OPTION...: to the command there, or here without a host
    lock "$1" "$2"
    host=$3 command=$4 name=$5
    shift 5
    # Who receives removes what is there first: that may be what an action beside this one has brought.
    v show "$name" >/dev/null || exit
    if [ -n "$host" ]; then
        v send "$name" "$@" | ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 \
            -o ServerAliveCountMax=3 "$host" "$command" 9>&- || exit
    else
        v send "$name" "$@" | sh -c "$command" 9>&- || exit
    fi
    ;;

receive) # FOLDER KEY LINK NAME IMAGE FORMAT: prints the path; LINK and FORMAT may be empty
    lock "$1" "$2"
    gone destroy "$4"
    made=$(v receive "$4" "$5") || exit
    [ -z "$6" ] || fits "$4" "$made" "$6"
    [ -z "$3" ] || link "$3" "$made"
    printf '%s\n' "$made"
    ;;

link) # FOLDER KEY LINK TARGET MONITOR
    lock "$1" "$2"
    link "$3" "$4"
    monitored "$3" "$5"
    ;;

moved) # FOLDER KEY LINK TARGET NAME: NAME may be empty; no link if the VM's folder is not there
    lock "$1" "$2"
    [ ! -d "$(dirname "$3")" ] || link "$3" "$4"
    [ -z "$5" ] || gone destroy "$5"
    ;;

destroy) # FOLDER KEY LINK NAME END: LINK may be empty; END: no action goes on with it, or ""
    [ -z "$5" ] || end_others "$1/$2.lock"
    lock "$1" "$2"
    gone destroy "$4"
    if [ -n "$3" ]; then
        rm -f "$3" || exit
        # An action that came after the folder's removal made a new folder for its link.
        rmdir "$(dirname "$3")" 2>/dev/null
    fi
    :
    ;;

snapshot) # FOLDER KEY NAME SNAPSHOT DOMAIN URI: DOMAIN is empty if the VM does not run
    lock "$1" "$2"
    # One of this name is from a try whose answer was lost: what it holds is old.
    gone snapshot delete "$3" "$4"
    if [ -n "$5" ]; then
        # A guest may have frozen though its answer was late.
        uri=$6 domain=$5
        at_end() { timeout 60 virsh -c "$uri" domfsthaw "$domain" >/dev/null 2>&1; }
        timeout 60 virsh -c "$6" domfsfreeze "$5" >/dev/null 2>&1
    fi
    v snapshot create "$3" "$4" >/dev/null || exit
    ;;

drop-system-snapshots) # FOLDER KEY NAME: those that the hypervisor took inside the disk's file
    lock "$1" "$2"
    made=$(path "$3") || exit
    # QEMU 8 and later name the file's nodes, too: only the list of snapshots counts.
    [ -b "$made" ] || qemu-img info -U -f qcow2 "$made" --output=json |
        sed -n '/^    "snapshots": /,/^    \]/s/^ *"name": "\(.*\)",*$/\1/p' |
        while read -r snapshot; do qemu-img snapshot -d "$snapshot" "$made" 9>&- || exit; done || exit
    ;;

revert) # FOLDER KEY LINK NAME SNAPSHOT
    lock "$1" "$2"
    v snapshot revert "$4" "$5" >/dev/null || exit
    made=$(path "$4") || exit
    [ -z "$3" ] || link "$3" "$made"
    ;;

forget) # FOLDER KEY NAME SNAPSHOT: the disk must be there
    lock "$1" "$2"
    v show "$3" >/dev/null || exit
    gone snapshot delete "$3" "$4"
    ;;

resize) # FOLDER KEY NAME SIZE
    lock "$1" "$2"
    v resize "$3" "$4" >/dev/null || exit
    ;;

publish) # FOLDER KEY IMAGE DISK BASE: what the disk holds; with BASE it is made of that image first
    lock "$1" "$2"
    [ -z "$5" ] || v create "$4" "$5" >/dev/null || exit
    v publish "$3" --from-vm "$4" --json || exit
    ;;

sweep) # FOLDER IMAGE NAME...: removes the disks and images whose names begin with IMAGE, but for these NAMEs
    # Not beside an upload that was given up, and ends well later.
    lock "$1" "$2"
    image=$2
    shift 2
    ours() {
        awk -v image="$image" -v named="$* " '
            ($1 == image || index($1, image "-") == 1) && !index(" " named, " " $1 " ") { print $1 }'
    }
    listed=$(v list) || exit
    for name in $(printf '%s\n' "$listed" | ours "$@"); do
        gone destroy "$name"
    done
    listed=$(v images) || exit
    for name in $(printf '%s\n' "$listed" | ours "$@"); do
        gone unpublish "$name" --when-unused
    done
    ;;

upload) # FOLDER KEY IMAGE: a tar of one file named "disk" comes in
    lock "$1" "$2"
    for left in "$1"/*.upload; do
        # Of one that was killed, or the host with it: nobody has its lock.
        [ -d "$left" ] && flock -n "${left%.upload}.lock" rm -rf "$left" "${left%.upload}.lock"
    done
    file=$1/$3.upload
    at_end() { rm -rf "$file"; }
    mkdir "$file" && tar -xSf - -C "$file" || exit
    v publish "$3" "$file/disk" --json || exit
    ;;

export) # FOLDER KEY NAME [--image]: as qcow2, to standard output
    lock "$1" "$2"
    file=$1/$2.export
    at_end() { rm -f "$file"; }
    rm -f "$file"
    name=$3
    shift 3
    v export "$name" "$file" --format qcow2 "$@" >/dev/null && cat "$file" || exit
    ;;

backup-begin) # FOLDER: the VM's XML in base64 comes in
    rm -rf "$1" && mkdir -p "$1" && cat >"$1/vm.xml" || exit
    ;;

backup) # FOLDER KEY NAME FILE
    lock "$1" "$2"
    rm -f "$4" && v export "$3" "$4" --format qcow2 >/dev/null || exit
    ;;

backup-file) # DISK FORMAT FILE: of a volatile disk
    rm -f "$3" && qemu-img convert -f "$2" -O qcow2 "$1" "$3" >/dev/null || exit
    ;;

backup-end) # FOLDER
    rm -rf "$1" || exit
    ;;

restore) # FOLDER KEY LINK NAME SNAPSHOT...: a qcow2 file comes in; the snapshots go
    lock "$1" "$2"
    file=$1/$2.restore link=$3 name=$4
    shift 4
    at_end() { rm -f "$file"; }
    cat >"$file" || exit
    whole "$file"
    made=$(path "$name") || exit
    if [ -b "$made" ]; then format=raw; else format=qcow2; fi
    needed=$(qemu-img info -f qcow2 "$file" --output=json | sed -n 's/^    "virtual-size": \([0-9]*\),$/\1/p')
    has=$(v show "$name" --json | sed -n 's/^    "size": \([0-9]*\),$/\1/p')
    if [ "${needed:-0}" -gt "${has:-0}" ]; then
        v resize "$name" "$needed" >/dev/null || exit
    fi
    for snapshot; do
        v snapshot delete "$name" "$snapshot" || exit
    done
    qemu-img convert -n -f qcow2 -O "$format" "$file" "$made" 9>&- || exit
    link "$link" "$made"
    ;;

restore-file) # DISK FORMAT: a qcow2 file comes in, for a volatile disk
    file=$1.restore
    trap 'rm -f "$file" "$1.new"' EXIT
    cat >"$file" || exit
    whole "$file"
    qemu-img convert -f qcow2 -O "$2" "$file" "$1.new" && mv -fT "$1.new" "$1" || exit
    ;;

folder) # FOLDER: says whether it is there
    [ ! -d "$1" ] || echo yes
    ;;

mark) # FOLDER: our folder in a system datastore, by which our probe knows the datastore
    mkdir -p "$1" || exit
    ;;

status)
    v status --json || exit
    ;;

deployment) # IMAGE: its newest deployment, or nothing
    listed=$(v deployments) || exit
    number=$(printf '%s\n' "$listed" | awk -v image="$1" '$2 == image { print $1; exit }')
    [ -z "$number" ] || v deployments "$number" --json || exit
    ;;

deploy) # IMAGE METHOD: to all hosts, by themselves
    v deploy "$1" --all --method "$2" --detach || exit
    ;;

*)
    fail "no action $action"
    ;;
esac
