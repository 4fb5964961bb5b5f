//! The members of the next world, their ranks, and the node that hosts the store.

use crate::NodeInfo;

/// The next world.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct World {
    /// The members, by node rank.
    pub members: Vec<NodeInfo>,
    /// The node rank of the member that hosts the workers' TCPStore.
    pub store_host: usize,
}

/// Forms a world of at most `max` candidates, which are given in the order in which they joined.
///
/// Survivors of the last world take precedence, then the nodes that joined first. A survivor keeps its rank; only if
/// the world has become too small for that rank does it move into a gap. Requested ranks are granted where they are
/// free. The store stays where it is; if its host is gone it moves to the survivor with the lowest rank, because the
/// other nodes are known to reach a survivor.
pub fn form(last: &[NodeInfo], store_host: usize, candidates: &[&NodeInfo], max: usize) -> World {
    let last_rank = |agent: &NodeInfo| last.iter().position(|member| member.is(agent));
    let (mut chosen, mut newcomers): (Vec<_>, Vec<_>) = candidates
        .iter()
        .map(|&agent| (last_rank(agent), agent))
        .partition(|(rank, _)| rank.is_some());
    chosen.sort_by_key(|&(rank, _)| rank);
    chosen.append(&mut newcomers);
    chosen.truncate(max);

    let mut ranks: Vec<Option<&NodeInfo>> = vec![None; chosen.len()];
    let mut unassigned = Vec::new();
    for &(rank, agent) in &chosen {
        // Survivors come first, so no requested rank displaces a survivor.
        let wanted = rank.or(agent.node_rank.map(|rank| rank as usize));
        match wanted.and_then(|rank| ranks.get_mut(rank)) {
            Some(free @ None) => *free = Some(agent),
            _ => unassigned.push(agent),
        }
    }
    let mut unassigned = unassigned.into_iter();
    let members: Vec<NodeInfo> = ranks
        .into_iter()
        .filter_map(|member| member.or_else(|| unassigned.next()))
        .cloned()
        .collect();

    let new_rank = |agent: &NodeInfo| members.iter().position(|member| member.is(agent));
    let store_host = last
        .get(store_host)
        .and_then(new_rank)
        .or_else(|| {
            members
                .iter()
                .position(|member| last_rank(member).is_some())
        })
        .unwrap_or(0);
    World {
        members,
        store_host,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::Address;

    fn agent(name: u32, node_rank: Option<u32>) -> NodeInfo {
        NodeInfo {
            node: format!("n{name}"),
            instance: 1,
            num_workers: 1,
            capabilities: BTreeSet::new(),
            node_rank,
            store: Address {
                host: format!("n{name}"),
                port: 1,
            },
        }
    }

    fn names(world: &World) -> Vec<&str> {
        world
            .members
            .iter()
            .map(|member| member.node.as_str())
            .collect()
    }

    fn formed(last: &[NodeInfo], store_host: usize, candidates: &[NodeInfo], max: usize) -> World {
        form(
            last,
            store_host,
            &candidates.iter().collect::<Vec<_>>(),
            max,
        )
    }

    #[test]
    fn a_new_node_takes_the_rank_of_a_lost_one() {
        let last: Vec<_> = (0..4).map(|n| agent(n, None)).collect();
        let now = [
            agent(9, None),
            agent(3, None),
            agent(0, None),
            agent(2, None),
        ];
        let world = formed(&last, 1, &now, 4);
        assert_eq!(names(&world), ["n0", "n9", "n2", "n3"]);
        assert_eq!(world.store_host, 0, "the store moves to a survivor");
    }

    #[test]
    fn in_a_smaller_world_only_ranks_out_of_range_change() {
        let last: Vec<_> = (0..4).map(|n| agent(n, None)).collect();
        let world = formed(
            &last,
            2,
            &[agent(1, None), agent(2, None), agent(3, None)],
            4,
        );
        assert_eq!(names(&world), ["n3", "n1", "n2"]);
        assert_eq!(world.store_host, 2, "the store stays");
    }

    #[test]
    fn requested_ranks_are_granted() {
        let now = [agent(7, Some(2)), agent(8, None), agent(9, Some(0))];
        assert_eq!(names(&formed(&[], 0, &now, 3)), ["n9", "n8", "n7"]);
        let far = [agent(7, Some(5)), agent(8, None)];
        assert_eq!(names(&formed(&[], 0, &far, 8)), ["n7", "n8"]);
    }

    #[test]
    fn a_restarted_agent_does_not_count_as_a_survivor() {
        let last = [agent(0, None), agent(1, None)];
        let mut again = agent(0, None);
        again.instance = 2;
        let world = formed(&last, 0, &[again, agent(1, None)], 2);
        assert_eq!(names(&world), ["n0", "n1"]);
        assert_eq!(world.store_host, 1);
    }

    proptest! {
        #[test]
        fn a_survivor_keeps_its_rank(
            last in prop::collection::btree_set(0u32..20, 0..10),
            now in prop::collection::btree_set(0u32..20, 1..15),
            requested in prop::collection::vec(prop::option::of(0u32..12), 20),
            store_host in 0usize..10,
            max in 1usize..12,
        ) {
            let last: Vec<_> = last.into_iter().map(|n| agent(n, None)).collect();
            let now: Vec<_> = now.into_iter().map(|n| agent(n, requested[n as usize])).collect();
            let world = formed(&last, store_host, &now, max);
            prop_assert_eq!(world.members.len(), now.len().min(max));
            let distinct: BTreeSet<_> = names(&world).into_iter().collect();
            prop_assert_eq!(distinct.len(), world.members.len());
            for (rank, member) in world.members.iter().enumerate() {
                let before = last.iter().position(|other| other.is(member));
                if let Some(before) = before.filter(|&before| before < world.members.len()) {
                    prop_assert_eq!(before, rank);
                }
            }
            let survived = |agent: &NodeInfo| last.iter().any(|other| other.is(agent));
            if world.members.iter().any(survived) {
                prop_assert!(survived(&world.members[world.store_host]));
            }
        }
    }
}
