//! Every compressor of DDP.

use std::error::Error;

use trainyard_config::{Config, Dtype, GradientCompression};
use trainyard_conformance::training::{
    Session, Trained, agreed_fingerprint, debug_llama, divided, finish, train_on,
};
use trainyard_conformance::{Outcome, Rank};
use trainyard_parallel::{AuditedReduction, DdpOptions};
use trainyard_trace::Purpose;
use trainyard_train::build;
use trainyard_train::dry_run::dry_run;

/// A compressor, and how many times fewer bytes it sends on two ranks.
const COMPRESSORS: [(GradientCompression, f64); 7] = [
    (GradientCompression::Bf16, 2.0),
    (GradientCompression::Fp16, 2.0),
    (GradientCompression::Int8, 3.9),
    (GradientCompression::Fp8, 3.9),
    (GradientCompression::TopK, 90.0),
    (GradientCompression::RandomK, 90.0),
    (GradientCompression::PowerSgd, 20.0),
];

fn compressed(rank: &Rank, compression: GradientCompression) -> Config {
    let mut config = divided(&debug_llama(Dtype::Float32), rank.size(), 1);
    config.parallelism.gradient_compression = compression;
    config.parallelism.power_sgd_start_step = 0;
    // Several buckets, with a last one that fills no whole chunk.
    config.parallelism.first_bucket_mb = 0.1;
    config.parallelism.bucket_cap_mb = 0.2;
    config
}

/// Trains with a hook whose sums are compared with exact ones. Returns the largest difference.
fn audited(rank: &Rank, config: &Config) -> Result<(Trained, f64), Box<dyn Error>> {
    let world = rank.join_config(config)?;
    let options = build::ddp_options(config);
    let hook = AuditedReduction::new(options.hook);
    let worst = hook.worst();
    let options = DdpOptions {
        hook: Box::new(hook),
        ..options
    };
    let session = Session::with_options(config, &world, options)?;
    let run = finish(session, config, &world)?;
    let worst = *worst.lock().map_err(|_| "a hook has panicked")?;
    Ok((run, worst))
}

pub fn sums_and_bytes(rank: &Rank) -> Outcome {
    let bytes = |run: &Trained| run.totals.of_purpose(Purpose::Gradient).sent_bytes as f64;
    let mut config = compressed(rank, GradientCompression::None);
    config.training.steps = 4;
    let plain = bytes(&train_on(rank, &config)?);
    for (compression, fewer) in COMPRESSORS {
        let (name, bound) = (compression.name(), compression.max_difference());
        let mut config = compressed(rank, compression);
        config.training.steps = 4;
        let (run, worst) = audited(rank, &config)?;
        assert!(worst > 0.0, "{name} loses nothing");
        assert!(worst <= bound, "{name} is off by {worst:e} > {bound:e}");
        run.assert_bytes(rank, 0, name)?;
        agreed_fingerprint(rank, &run)?;
        let ratio = plain / bytes(&run);
        if rank.size() == 2 {
            assert!(
                ratio >= fewer,
                "{name} sends only {ratio} times fewer bytes"
            );
        }
    }
    Ok(())
}

/// A dry run sends and holds what the closed forms say.
pub fn dry_runs(rank: &Rank) -> Outcome {
    for (compression, _) in COMPRESSORS {
        let mut config = compressed(rank, compression);
        config.training.steps = 1;
        let run = train_on(rank, &config)?;
        let sent = run.totals.of_purpose(Purpose::Gradient).sent_bytes;
        let dry = dry_run(&(&config).into(), rank.size(), rank.index())?;
        let rows = dry.collectives.iter();
        let gradients = rows.filter(|row| row.purpose == Purpose::Gradient);
        let dry_sent: u64 = gradients.map(|row| row.sent_bytes).sum();
        assert_eq!(dry_sent, sent, "{}", compression.name());
        assert_eq!(dry.states, dry.states_by_formula, "{}", compression.name());
    }
    Ok(())
}

/// The loss falls as without compression, or almost so.
pub fn convergence(rank: &Rank) -> Outcome {
    let losses = |compression| -> Result<Vec<f64>, Box<dyn Error>> {
        let mut config = compressed(rank, compression);
        config.training.steps = 60;
        config.parallelism.gradient_compression_ratio = 0.1;
        let run = train_on(rank, &config)?;
        Ok(run.losses)
    };
    let plain = losses(GradientCompression::None)?;
    let (first, last) = (plain[0], plain[plain.len() - 1]);
    for (compression, _) in COMPRESSORS {
        let found = losses(compression)?;
        let share = (first - found[found.len() - 1]) / (first - last);
        let wanted = if compression.keeps_errors() {
            0.3
        } else {
            0.95
        };
        rank.note(format!("{}: {share:.2}", compression.name()));
        assert!(
            share > wanted,
            "{} reaches {share} of the decrease of the loss",
            compression.name()
        );
    }
    Ok(())
}
