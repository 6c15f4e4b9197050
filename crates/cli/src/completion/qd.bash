# Bash completion of qd, printed by `qd completions bash`. Each Tab runs `qd __complete`, which prints a line for each
# candidate: the value, a tab, a description.
_qd() {
    local value description longest=0 at
    local -a values=() descriptions=()
    COMPREPLY=()
    while IFS=$'\t' read -r value description; do
        values+=("$value")
        descriptions+=("$description")
        ((${#value} > longest)) && longest=${#value}
    done < <(qd __complete bash "$COMP_CWORD" "${COMP_WORDS[@]}" 2>/dev/null)
    # Descriptions are only for lists. A single candidate is typed for the user, and so are those of the types 37
    # (menu-complete) and 42 (insert-completions).
    if ((${#values[@]} < 2)) || [[ $COMP_TYPE == 37 || $COMP_TYPE == 42 ]]; then
        COMPREPLY=("${values[@]}")
    else
        local room=$((${COLUMNS:-80} - longest - 4))
        for at in "${!values[@]}"; do
            value=${values[at]}
            description=${descriptions[at]}
            if [[ -n $description ]] && ((room > 8)); then
                printf -v value '%-*s  (%s)' "$longest" "$value" "${description:0:room}"
            fi
            COMPREPLY+=("$value")
        done
    fi
    # What follows a directory or a flag with `=` belongs to the same word.
    if ((${#COMPREPLY[@]} == 1)) && [[ ${COMPREPLY[0]} == *[/=] ]]; then
        compopt -o nospace 2>/dev/null
    fi
    return 0
}
complete -o nosort -F _qd qd 2>/dev/null || complete -F _qd qd
