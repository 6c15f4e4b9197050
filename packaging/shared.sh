# What the scripts beside this file share: where packages go, how the program is built, how its manual pages and shell
# completions are written, and how a result is reported. It is sourced, and leaves the shell in the repository.
# shellcheck shell=bash
cd "$(dirname "${BASH_SOURCE[0]}")/.."

packages=$PWD/target/packages
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
# The cargo profile. Another one than `release` is only for trying the scripts, because it builds faster.
profile=${QD_PROFILE:-release}

# Pinned, so that the same sources give the same packages.
CARGO_DEB=3.8.0
CARGO_ZIGBUILD=0.24.0
ZIG=0.17.0

fail() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# profile_folder: the name of the profile's folder below target or target/TARGET.
profile_folder() {
  if [ "$profile" = dev ]; then echo debug; else echo "$profile"; fi
}

# write_manuals PROGRAM FOLDER: man1/ and completions/, as the program itself describes its commands.
write_manuals() {
  rm -rf "$2/man1" "$2/completions"
  mkdir -p "$2/man1" "$2/completions"
  "$1" man "$2/man1"
  local shell
  for shell in bash zsh fish; do "$1" completions "$shell" > "$2/completions/qd.$shell"; done
}

# report FILE...: what was made, and its size.
report() {
  local file
  for file in "$@"; do
    printf '%s (%s)\n' "$file" "$(du -h --apparent-size "$file" | cut -f1)"
  done
}
