//! Losses, gradient norms, every parameter, and bytes sent.

use trainyard_config::{Dtype, GradientCompression};
use trainyard_conformance::training::{
    Tolerance, Trained, agreed_fingerprint, debug_llama, divided, on_rank_0, reference, train,
};
use trainyard_conformance::{Outcome, Rank, device};
use trainyard_trace::{CollectiveKind, Purpose};

pub fn fp64(rank: &Rank) -> Outcome {
    equals_one_rank(rank, Dtype::Float64)
}

pub fn fp32(rank: &Rank) -> Outcome {
    equals_one_rank(rank, Dtype::Float32)
}

/// With and without accumulation and overlap. All ranks agree to the bit, and so do runs with and without overlap.
fn equals_one_rank(rank: &Rank, dtype: Dtype) -> Outcome {
    let config = debug_llama(dtype);
    let expected = on_rank_0(rank, || reference(&config))?;
    for num_microbatches in [1, 2] {
        let mut runs = Vec::new();
        for overlap in [true, false] {
            let mut config = divided(&config, rank.size(), num_microbatches);
            config.parallelism.overlap = overlap;
            // Several buckets, so that reductions can overlap.
            config.parallelism.first_bucket_mb = 0.02;
            config.parallelism.bucket_cap_mb = 0.05;
            let run = train(&config, &*rank.world()?)?;
            if let Some(expected) = &expected {
                run.assert_agrees(expected, Tolerance::of(dtype));
            }
            runs.push(agreed_fingerprint(rank, &run)?);
        }
        assert!(runs[0] == runs[1], "overlap changes the result");
    }
    Ok(())
}

pub fn compression(rank: &Rank) -> Outcome {
    let config = debug_llama(Dtype::Float32);
    let expected = on_rank_0(rank, || reference(&config))?;
    let plain = divided(&config, rank.size(), 1);
    let mut compressed = plain.clone();
    compressed.parallelism.gradient_compression = GradientCompression::Bf16;
    let mut reduced = plain.clone();
    reduced.training.mixed_precision_reduce = Some(Dtype::Bfloat16);
    let plain = train(&plain, &*rank.world()?)?;
    let bytes = |run: &Trained| run.totals.of_purpose(Purpose::Gradient).payload_bytes;
    for config in [compressed, reduced] {
        let run = train(&config, &*rank.world()?)?;
        if let Some(expected) = &expected {
            run.assert_agrees(expected, Tolerance::of(Dtype::Bfloat16));
            assert!(run.losses != expected.losses, "nothing was compressed");
        }
        agreed_fingerprint(rank, &run)?;
        assert_eq!(2 * bytes(&run), bytes(&plain));
    }
    Ok(())
}

pub fn mixed_precision(rank: &Rank) -> Outcome {
    let mut config = debug_llama(Dtype::Float32);
    config.training.mixed_precision_param = Some(Dtype::Bfloat16);
    let expected = on_rank_0(rank, || reference(&config))?;
    let run = train(&divided(&config, rank.size(), 1), &*rank.world()?)?;
    if let Some(expected) = &expected {
        run.assert_agrees(expected, Tolerance::of(Dtype::Bfloat16));
    }
    agreed_fingerprint(rank, &run)?;
    Ok(())
}

/// Gradients are reduced once per step whatever is accumulated, and all ranks together send 2 (n - 1) times their bytes.
pub fn bytes(rank: &Rank) -> Outcome {
    for (dtype, num_microbatches) in [
        (Dtype::Float32, 1),
        (Dtype::Float32, 2),
        (Dtype::Float64, 1),
    ] {
        let config = divided(&debug_llama(dtype), rank.size(), num_microbatches);
        let steps = config.training.steps;
        let num_parameters = config.model.resolve()?.num_parameters().unwrap_or_default();
        let run = train(&config, &*rank.world()?)?;
        let payload = steps * num_parameters * dtype.size() as u64;
        let gradients = run.totals.of_purpose(Purpose::Gradient);
        assert_eq!(gradients.payload_bytes, payload);
        assert_eq!(
            run.totals.of_kind(CollectiveKind::AllReduce),
            run.totals.all_collectives()
        );
        // The numbers of targets and of ranks with bad values, and the loss.
        assert_eq!(
            run.totals.of_purpose(Purpose::Control).payload_bytes,
            steps * (2 * 8 + 8)
        );
        let all = run.totals.all_collectives().sent_bytes;
        let facts = rank.all_gather(&[gradients.sent_bytes, all, run.wire_sent])?;
        let sum = |index: usize| facts.iter().map(|f| f[index]).sum::<u64>();
        assert_eq!(sum(0), 2 * (rank.size() as u64 - 1) * payload);
        let ratio = sum(2) as f64 / sum(1) as f64;
        // NCCL's bytes do not pass through sockets of this process.
        assert!(
            device().is_cuda() || (0.98..1.02).contains(&ratio),
            "the kernel counted {ratio:.4} of the ledger: {facts:?}"
        );
    }
    Ok(())
}
