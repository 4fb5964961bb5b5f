//! Several sites: when replicas should take steps of their own, and what that costs.

use trainyard_arch::{DecoderConfig, Flavor};
use trainyard_plan::{
    Calibration, Cluster, Compression, Degrees, LocalUpdateMethod, LocalUpdates, Offload,
    Overheads, Plan, PlanRequest, Precision, PrecisionByStage, Software, Synchronization, search,
};

fn request(flavor: Flavor, cluster: &str, global_batch: usize) -> PlanRequest {
    let cluster: Cluster = cluster.parse().unwrap();
    PlanRequest {
        shape: DecoderConfig::from(flavor),
        calibration: Calibration::of(&cluster.accelerator, Software::MODERN),
        cluster,
        overheads: Overheads::default(),
        global_batch,
        seq_len: 8192,
        precision: PrecisionByStage::same(Precision::BF16),
        allow_fewer_nodes: false,
    }
}

fn best(flavor: Flavor, cluster: &str) -> Plan {
    let found = search(&request(flavor, cluster, 1024)).plans;
    for plan in found.iter().take(4) {
        let strategy = &plan.strategy;
        println!(
            "{cluster}: {} ZeRO {}, {}: {:.2} s",
            strategy.degrees, strategy.zero_stage, strategy.synchronization, plan.time.likely
        );
    }
    found.into_iter().next().unwrap()
}

fn diloco(compression: Compression) -> LocalUpdates {
    LocalUpdates {
        compression,
        ..LocalUpdates::plain(LocalUpdateMethod::Diloco)
    }
}

#[test]
fn two_sites_with_a_slow_network_take_steps_of_their_own() {
    for flavor in [Flavor::Llama3_8b, Flavor::Llama3_70b] {
        let two = best(flavor, "2x64xH100@10Gb/s,30ms").strategy;
        let local = two.synchronization.local_updates().unwrap();
        assert_eq!(local.method, LocalUpdateMethod::Diloco);
        assert_eq!((two.degrees.dp_outer, two.degrees.world_size()), (2, 128));
        assert!([0, 3].contains(&two.zero_stage) && two.offload == Offload::None);
    }
}

#[test]
fn one_site_and_sites_with_a_fast_network_are_joined_in_every_step() {
    for flavor in [Flavor::Llama3_8b, Flavor::Llama3_70b] {
        for cluster in ["128xH100", "64xH100", "2x64xH100@3200Gb/s,0.1ms"] {
            let plan = best(flavor, cluster).strategy;
            assert_eq!(plan.synchronization, Synchronization::PLAIN, "{cluster}");
            assert_eq!(plan.degrees.dp_outer, 1);
        }
    }
}

/// The outer step: bytes at the bandwidth between the sites and a round trip, divided by the steps between two.
#[test]
fn an_outer_step_costs_its_bytes() {
    let request = request(Flavor::Llama3_8b, "2x64xH100@10Gb/s,30ms", 1024);
    let found = search(&request).plans;
    let sharded = found.iter().find(|plan| {
        let strategy = &plan.strategy;
        strategy.degrees.dp_outer == 2 && strategy.zero_stage == 3 && strategy.degrees.pp == 1
    });
    let strategy = &sharded.unwrap().strategy;
    let outer = |local: LocalUpdates| {
        let mut strategy = strategy.clone();
        strategy.synchronization = Synchronization::LocalUpdates(local);
        let plan = request.estimate(&strategy).unwrap();
        (plan.time.outer, plan.memory.states.outer)
    };
    let parameters = request.shape.num_parameters() as f64;
    let seconds = 4.0 * parameters / 1.25e9 + 0.03;
    let (plain, bytes) = outer(diloco(Compression::None));
    assert!((plain / (seconds / 100.0) - 1.0).abs() < 0.02, "{plain}");
    let shard = parameters / (strategy.degrees.dp_shard * strategy.degrees.tp) as f64;
    assert!((bytes / (12.0 * shard) - 1.0).abs() < 0.01, "{bytes}");
    let (int8, _) = outer(diloco(Compression::Int8));
    assert!((3.6..3.95).contains(&(plain / int8)), "{}", plain / int8);
    let sparse = LocalUpdateMethod::SparseLoco { share: 0.02 };
    let (sparse, sparse_bytes) = outer(LocalUpdates::plain(sparse));
    assert!(plain / sparse > 40.0, "{}", plain / sparse);
    assert!(
        (sparse_bytes / bytes - 1.0).abs() < 1e-9,
        "an error instead of a momentum"
    );
    let (late, _) = outer(LocalUpdates {
        fragment_sync_delay: 20,
        num_fragments: 4,
        ..diloco(Compression::None)
    });
    assert!(late < 0.15 * plain, "{late} of {plain}");
    let often = LocalUpdates {
        sync_steps: 10,
        ..diloco(Compression::None)
    };
    assert!((outer(often).0 / plain - 10.0).abs() < 1e-6);
}

/// Every GPU is a worker with a whole gradient, and the workers of a site share the network to the servers.
#[test]
fn workers_of_a_parameter_server_wait_only_without_staleness() {
    let request = request(Flavor::Llama3_8b, "2x64xH100@100000Gb/s,30ms", 1024);
    let mut strategy = best(Flavor::Llama3_8b, "2x64xH100@10Gb/s,30ms").strategy;
    strategy.degrees = Degrees {
        dp_outer: 128,
        ..Degrees::ONE
    };
    strategy.zero_stage = 0;
    let mut plan = |staleness| {
        strategy.synchronization = Synchronization::ParameterServer { staleness };
        request.estimate(&strategy).unwrap()
    };
    let (waits, overlaps) = (plan(0), plan(4));
    let whole = 4.0 * request.shape.num_parameters() as f64;
    let seconds = 2.0 * 64.0 * whole / 12.5e12 + 0.03;
    let outer = waits.time.outer;
    assert!((outer / seconds - 1.0).abs() < 0.02, "{outer}");
    assert!(overlaps.time.outer < 0.2 * outer);
    assert_eq!(waits.memory.states.optimizer, 0.0, "servers have them");
}
