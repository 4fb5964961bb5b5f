//! Loss scaling for float16.

use trainyard_config::Dtype;
use trainyard_conformance::training::{
    Session, debug_llama, divided, on_rank_0, reference, values,
};
use trainyard_conformance::{Outcome, Rank, is_full_run};
use trainyard_train::full_state_dict::full_parameters;

/// Whether or not the initial scale overflows, all ranks skip the same steps, end with the same weights, and learn.
pub fn float16(rank: &Rank) -> Outcome {
    let mut config = debug_llama(Dtype::Float32);
    config.training.mixed_precision_param = Some(Dtype::Float16);
    let alone = on_rank_0(rank, || reference(&config))?;
    let stages: &[usize] = if is_full_run() { &[1, 2, 3] } else { &[3] };
    for &stage in stages {
        let mut config = divided(&config, rank.size(), 1);
        config.parallelism.data_parallel_shard_degree = -1;
        config.parallelism.zero_stage = stage;
        let world = rank.join_config(&config)?;
        let mut session = Session::new(&config, &world)?;
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for _ in 0..config.training.steps {
            let outcome = session.step()?;
            losses.push(session.trainer.global_loss(&outcome.local_loss)?);
            norms.push(f64::try_from(&outcome.grad_norm)?.to_bits());
        }
        let all = rank.all_gather(&norms)?;
        assert!(
            all.iter().all(|each| *each == all[0]),
            "ranks judge differently"
        );
        let whole = values(&full_parameters(&session.trainer, &world)?);
        assert!(
            whole
                .values()
                .all(|t| t.isfinite().all().int64_value(&[]) == 1)
        );
        assert!(losses[losses.len() - 1] < losses[0], "{losses:?}");
        if let Some(alone) = &alone {
            let last = losses.len() - 1;
            let difference = (losses[last] - alone.losses[last]).abs() / alone.losses[last];
            assert!(difference < 2e-2, "{losses:?} against {:?}", alone.losses);
        }
    }
    Ok(())
}
