//! `[local_updates]` and `parallelism.gradient_compression`, in both directions.

use std::fmt::Write as _;

use trainyard_config::{Config, GradientCompression, LocalUpdateMethod as Method};
use trainyard_plan::{Compression, LocalUpdateMethod, LocalUpdates, Synchronization};

pub(super) fn read(config: &Config) -> Synchronization {
    let (section, parallelism) = (&config.local_updates, &config.parallelism);
    let ratio = section.compression_ratio;
    let method = match section.method {
        Method::None => {
            return Synchronization::EveryStep(compression(
                parallelism.gradient_compression,
                parallelism.gradient_compression_ratio,
                parallelism.power_sgd_rank,
            ));
        }
        Method::LocalSgd => LocalUpdateMethod::LocalSgd,
        Method::Diloco => LocalUpdateMethod::Diloco,
        Method::SparseLoco => LocalUpdateMethod::SparseLoco { share: ratio },
    };
    Synchronization::LocalUpdates(LocalUpdates {
        method,
        sync_steps: section.sync_steps,
        num_fragments: section.num_fragments,
        fragment_sync_delay: section.fragment_sync_delay,
        compression: compression(section.compression, ratio, parallelism.power_sgd_rank),
    })
}

/// What an estimate leaves out of a config with local updates.
pub(super) fn unmodeled(config: &Config) -> Option<String> {
    let name = config.parallelism.gradient_compression.name();
    let is_local = config.local_updates.method != Method::None;
    (is_local && name != "none").then(|| {
        format!("parallelism.gradient_compression = \"{name}\": inside of replicas that take steps of their own")
    })
}

fn compression(compression: GradientCompression, share: f64, rank: usize) -> Compression {
    match compression {
        GradientCompression::None => Compression::None,
        GradientCompression::Bf16 => Compression::Bf16,
        GradientCompression::Fp16 => Compression::Fp16,
        GradientCompression::Int8 => Compression::Int8,
        GradientCompression::Fp8 => Compression::Fp8,
        GradientCompression::TopK => Compression::TopK { share },
        GradientCompression::RandomK => Compression::RandomK { share },
        GradientCompression::PowerSgd => Compression::PowerSgd { rank },
    }
}

/// Writes the keys of `[parallelism]`, at whose end the text is.
pub(super) fn write_gradient_compression(out: &mut String, synchronization: &Synchronization) {
    let Synchronization::EveryStep(compression) = synchronization else {
        return;
    };
    if *compression == Compression::None {
        return;
    }
    let _ = writeln!(out, "gradient_compression = \"{}\"", compression.name());
    match compression {
        Compression::TopK { share } | Compression::RandomK { share } => {
            let _ = writeln!(out, "gradient_compression_ratio = {share}");
        }
        Compression::PowerSgd { rank } => {
            let _ = writeln!(out, "power_sgd_rank = {rank}");
        }
        _ => {}
    }
}

/// Writes the table `[local_updates]`, if replicas take steps of their own.
pub(super) fn write_local_updates(out: &mut String, synchronization: &Synchronization) {
    let Some(local) = synchronization.local_updates() else {
        return;
    };
    let _ = write!(
        out,
        "\n[local_updates]\nmethod = \"{}\"\nsync_steps = {}\n",
        local.method.name(),
        local.sync_steps
    );
    if local.num_fragments > 1 {
        let _ = writeln!(out, "num_fragments = {}", local.num_fragments);
    }
    if local.fragment_sync_delay > 0 {
        let _ = writeln!(out, "fragment_sync_delay = {}", local.fragment_sync_delay);
    }
    if local.compression != Compression::None {
        let _ = writeln!(out, "compression = \"{}\"", local.compression.name());
    }
    let share = match (local.method, local.compression) {
        (LocalUpdateMethod::SparseLoco { share }, _)
        | (_, Compression::TopK { share } | Compression::RandomK { share }) => share,
        _ => return,
    };
    let _ = writeln!(out, "compression_ratio = {share}");
}
