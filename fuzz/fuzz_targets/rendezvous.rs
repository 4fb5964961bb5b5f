//! Arbitrary bytes as the requests of agents: no panic, epochs and versions never go back, at most one world per epoch,
//! and every state survives being written and read.
#![no_main]

use std::collections::BTreeMap;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};
use trainyard_fuzz::bounded;
use trainyard_rendezvous::{Coordinator, Epoch, NodeInfo, Request, RunState};

const RUN: &str = "run";

/// The requests of the input: a line of JSON as it is, or one made of few bytes, so that most of them are valid.
fn requests(bytes: &[u8]) -> Vec<Option<Request>> {
    let text = |bytes: &[u8]| serde_json::from_slice(bytes).ok();
    if bytes.first() == Some(&b'{') {
        return bytes.split(|byte| *byte == b'\n').map(text).collect();
    }
    bytes.chunks_exact(4).map(|bytes| serde_json::from_value(request(bytes)).ok()).collect()
}

fn request(bytes: &[u8]) -> Value {
    let [kind, node, number, flags] = [bytes[0], bytes[1], bytes[2], bytes[3]];
    let name = format!("node{}", node % 4);
    let instance = node / 4 % 2;
    let kind = match kind % 6 {
        0 | 1 => json!({ "Join": join(&name, instance, number, flags) }),
        2 => json!({ "Heartbeat": { "known": number } }),
        3 => json!({ "Report": { "epoch": number, "report": "Succeeded" } }),
        4 => json!({ "Report": { "epoch": number, "report": {
            "Failed": { "message": "it failed", "is_final": flags % 8 == 0 }
        } } }),
        _ if flags % 4 == 0 => json!("Leave"),
        _ => json!({ "Report": { "epoch": number, "report": "Stopped" } }),
    };
    json!({ "id": number, "node": name, "instance": instance, "kind": kind })
}

fn join(name: &str, instance: u8, number: u8, flags: u8) -> Value {
    let policy = trainyard_rendezvous::Policy::new(1, 2 + u32::from(flags % 2));
    json!({
        "run": RUN,
        "policy": policy,
        "node_info": {
            "node": name,
            "instance": instance,
            "num_workers": 1 + flags % 3,
            "capabilities": [],
            "node_rank": null,
            "store": { "host": "127.0.0.1", "port": 1 },
        },
        "watermark": { "epoch": number % 4, "version": number },
        "last_report": null,
    })
}

fuzz_target!(|bytes: &[u8]| {
    let requests = requests(bytes);
    bounded(bytes.len(), || {
        let mut coordinator = Coordinator::resume(RunState::new(RUN), Duration::ZERO);
        let mut worlds: BTreeMap<Epoch, Vec<NodeInfo>> = BTreeMap::new();
        let mut now = Duration::ZERO;
        for (request, byte) in requests.into_iter().zip(bytes) {
            now += Duration::from_millis(20 * u64::from(*byte));
            let before = coordinator.run_state().clone();
            let _ = match request {
                Some(request) => coordinator.handle(request, now),
                None => coordinator.tick(now),
            };
            let state = coordinator.run_state();
            assert!(state.version >= before.version && state.epoch >= before.epoch);
            let world = worlds.entry(state.epoch).or_insert_with(|| state.world.clone());
            assert!(state.world.is_empty() || *world == state.world, "two worlds of one epoch");
            let text = serde_json::to_vec(state).expect("a state is written");
            let again: RunState = serde_json::from_slice(&text).expect("a state is read");
            assert_eq!(again, *state);
        }
    });
});
