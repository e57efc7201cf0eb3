#!/usr/bin/env bash
# Measures what docs/trainers/ups.md shows, on the GPUs that CUDA_VISIBLE_DEVICES names: ups_figures.sh OUT PART [SEED]
#
#   data         the data that all other parts need
#   steps        what a step takes, with each phase of the source added in turn; on as many GPUs as there are
#   training     a run of eight minutes, on as many GPUs as there are
#   evaluation   the errors of its predictions, and its curve
#   same_work    both trainers of configs/ups/1gpu_{baseline,fast}.yaml on as many steps of 24 examples, for the seed
#                given, with the reference's losses and query points in every batch of the optimized trainer, too
#   quality      the optimized trainer alone, with same_work's settings beside those of 1gpu_fast.yaml
#   rivals       ups, an FNO and a U-Net, each given four minutes
#   claims       what the source claims
#   ablation     what each technique brings
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$(realpath -m "$1") part=$2 seed=${3:-0}
data=$out/data
python=${PERFSUITE_PYTHON:-python3}
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if [ "$part" != data ] && [ "$gpus" -lt 1 ]; then
    echo "ups_figures.sh: $part needs a GPU, and torch sees none" >&2
    exit 2
fi
mkdir -p "$out"

perfsuite() { "$python" -m perfsuite "$@"; }

# What the reference trains in four minutes, at 0.41 s a step.
steps=${STEPS:-580}

compare() { # NAME OPTIONS: two configurations on the same data
    perfsuite ab ups "${@:2}" --data "$data" --windows "$steps" --seed "$seed" --out "$out/$1-$seed" --overwrite
}

configured() { # NAME OPTIONS OF SED: 1gpu_fast.yaml in steps of 24 examples, as the reference's are
    sed "${@:2}" -e 's/^accumulation:.*/accumulation: 1/' configs/ups/1gpu_fast.yaml >"$out/$1-$seed.yaml"
    echo "$out/$1-$seed.yaml"
}

case $part in
data)
    perfsuite data pde "$data/1D_Advection_Sols_beta1.0.hdf5" --task advection1d --samples "${SAMPLES:-400}" --workers 8
    perfsuite data pde "$data/2D_DarcyFlow_beta1.0_Train.hdf5" --task darcy2d --samples "${SAMPLES:-400}" --workers 8
    ;;
steps) "$python" tools/ups_steps.py "$data" --ranks "$gpus" --out "$out/steps-$gpus.json" ;;
training)
    perfsuite train ups --config "configs/ups/${gpus}gpu_fast.yaml" --data "$data" --ranks "$gpus" \
        --seconds "${SECONDS_OF_TRAINING:-480}" --epochs 100000 --folder "$out/training" --overwrite
    ;;
evaluation)
    for weights in averages trained; do
        perfsuite evaluate ups --checkpoint "$out/training" --data "$data" --weights "$weights" --out "$out/training-$weights"
    done
    perfsuite curve "$out/training" --out "$out/training.svg"
    ;;
same_work | quality)
    whole=$(configured "same_work_$part" -e 's/^inverse_loss_frequency:.*/inverse_loss_frequency: 1/' \
        -e 's/^num_queries:.*/num_queries: 2048/' -e 's/^coder_rate:.*/coder_rate: 1/')
    if [ "$part" = same_work ]; then
        compare "$part" --baseline configs/ups/1gpu_baseline.yaml --optimized "$whole"
    else
        compare "$part" --baseline "$whole" --baseline-side optimized --optimized "$(configured quality)"
    fi
    ;;
rivals) "$python" tools/ups_rivals.py "$data" --seconds "${SECONDS_OF_RIVALS:-240}" --out "$out/rivals.json" ;;
claims) perfsuite claims ups --out "$out/claims" ;;
ablation) perfsuite ablate ups --config configs/ups/1gpu_fast.yaml --data "$data" --rounds 7 --windows 4 --out "$out/ablation" ;;
*)
    echo "ups_figures.sh: no part is called $part; see the top of this file" >&2
    exit 2
    ;;
esac
