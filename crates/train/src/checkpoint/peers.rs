//! The memory of this job's peers: named by the launcher, or found out when ranks meet.
//!
//! Where machines come and go nobody can name them beforehand. Then every rank knows the holder of its
//! own machine, and the ranks tell each other.

use trainyard_copies::{OwnHolder, PeerStore, from_environment};
use trainyard_torch::World;

use crate::error::{Result, TrainError};

/// The memory of peers; none where there are no holders. All ranks must ask.
pub fn peers(world: &World) -> Result<Option<PeerStore>> {
    let variable = |name: &str| std::env::var(name).ok();
    let failed = |reason: &dyn std::fmt::Display| TrainError::Peers(reason.to_string());
    let own = OwnHolder::from_environment(variable).map_err(|e| failed(&e))?;
    let Some(own) = own else {
        return from_environment(variable).map_err(|e| failed(&e));
    };
    let number = |name: &str| variable(name)?.parse::<usize>().ok();
    let node = number("GROUP_RANK").unwrap_or(0);
    let num_nodes = number("GROUP_WORLD_SIZE").unwrap_or(1);
    let holders = match world.meeting("holders")? {
        Some(meeting) => {
            if number("LOCAL_RANK").unwrap_or(0) == 0 {
                meeting.set(&node.to_string(), own.address.as_bytes())?;
            }
            let told = (0..num_nodes).map(|node| meeting.get(&node.to_string()));
            let told = told.map(|told| Ok(String::from_utf8_lossy(&told?).into_owned()));
            told.collect::<Result<Vec<String>>>()?
        }
        None => vec![own.address.clone()],
    };
    let all = own.among(&holders, node).map_err(|e| failed(&e))?;
    Ok(Some(all))
}
