#!/bin/sh
# An agent without any library: each rollout calls the model by curl under its own base URL, and sets its reward by PUT.
#
#     ART_SERVER_URL=http://127.0.0.1:5000 ART_API_KEY=... sh rollouts.sh
#
# STEPS (10) training steps of GROUPS_PER_STEP (4) scenarios with ROLLOUTS (8) rollouts each; train.py trains on them.
set -eu

URL=${ART_SERVER_URL:-http://127.0.0.1:5000}
MODEL=${MODEL:-shell/agent}
STEPS=${STEPS:-10}
GROUPS_PER_STEP=${GROUPS_PER_STEP:-4}
ROLLOUTS=${ROLLOUTS:-8}
RUN=${RUN:-$(date +%s)}
PROJECT=${MODEL%/*}
NAME=${MODEL#*/}

call() { # method, path, [JSON body]: prints the answer; tries again while the server is down
    curl --silent --show-error --fail --retry 8 --retry-connrefused --max-time 120 -X "$1" "$URL$2" \
        -H "Authorization: Bearer $ART_API_KEY" -H "Content-Type: application/json" ${3:+--data "$3"}
}

wait_for_step() { # step: waits until the model has reached it, and prints the model's step
    for _ in $(seq 600); do
        current=$(call GET "/api/models/$PROJECT/$NAME" 2>/dev/null | sed -n 's/.*"step":\([0-9]*\).*/\1/p')
        if [ -n "$current" ] && [ "$current" -ge "$1" ]; then
            echo "$current"
            return
        fi
        sleep 0.2
    done
    echo "$MODEL did not reach step $1 within two minutes; is train.py running?" >&2
    return 1
}

rollout() { # rollout id, group id, question
    body="{\"model\": \"$MODEL\", \"messages\": [{\"role\": \"user\", \"content\": \"$3\"}], \"max_completion_tokens\": 8}"
    answer=$(call POST "/rollouts/$1/v1/chat/completions" "$body" | sed -n 's/.*"content":"\([^"]*\)".*/\1/p')
    case $answer in
        maybe) reward=1.0 ;;
        no) reward=0.75 ;;
        yes) reward=0.5 ;;
        *) reward=0.0 ;;
    esac
    call PUT "/api/rollouts/$1" "{\"group_id\": \"$2\", \"reward\": $reward}" >/dev/null
    echo "$reward"
}

question() {
    case $1 in
        1) echo "respond with yes or no" ;;
        2) echo "say yes, no or maybe" ;;
        3) echo "answer maybe, no or yes" ;;
        *) echo "yes or maybe?" ;;
    esac
}

step=$(wait_for_step 0)
last=$((step + STEPS))
while [ "$step" -lt "$last" ]; do
    rewards=$(
        for group in $(seq "$GROUPS_PER_STEP"); do
            for i in $(seq "$ROLLOUTS"); do
                id="$RUN-$step-$group"
                rollout "$id-$i" "$id" "$(question "$group")" &
            done
        done
        wait
    )
    echo "step $step: mean reward $(echo "$rewards" | awk '{ sum += $1 } END { printf "%.3f", sum / NR }')"
    step=$(wait_for_step $((step + 1)))
done
