#!/bin/bash
# Pretrains a Llama on one node.
set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=1

CHECKPOINT_PATH=${1:-checkpoints/llama}
DATA_PATH=${2:-data/c4_text_document}
GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-1}
MASTER_PORT=$((6000 + RANDOM % 1000))
NODE_RANK=${SLURM_NODEID:-0}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
TP=2

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --node_rank $NODE_RANK
    --master_port $MASTER_PORT
)

MODEL_ARGS="--num-layers 32 \
    --hidden-size 4096 \
    --ffn-hidden-size 14336 \
    --num-attention-heads 32 \
    --group-query-attention --num-query-groups 8 \
    --max-position-embeddings 8192 --seq-length 8192 \
    --swiglu --normalization RMSNorm --position-embedding-type rope \
    --disable-bias-linear --untie-embeddings-and-output-weights \
    --rotary-base 500000 --padded-vocab-size 128256 \
    --attention-dropout 0.0 --hidden-dropout 0.0"

TRAINING_ARGS=(
    --micro-batch-size 1      # samples of one pass
    --global-batch-size 64
    --train-iters 1000
    --lr 3.0e-4
    --min-lr 3.0e-5
    --lr-decay-style cosine
    --lr-warmup-iters 100
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size "${TP}"
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

mkdir -p "$CHECKPOINT_PATH"
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    $MODEL_ARGS \
    "${TRAINING_ARGS[@]}" \
    ${PARALLEL_ARGS[@]} \
    --data-path "$DATA_PATH" \
    --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --save-interval 500 \
    --log-interval 10 --eval-iters 10 \
    "$@" 2>&1 | tee train.log
