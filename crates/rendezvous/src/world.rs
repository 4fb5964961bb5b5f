//! Who is in the next world, with which rank, and who holds the store.

use crate::Advert;

/// A world to be: its members by node rank, and which of them holds the workers' store.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct World {
    /// By node rank.
    pub members: Vec<Advert>,
    /// The rank of the holder.
    pub holder: usize,
}

/// Forms a world of at most `max` of the candidates, who come in the order in which they joined.
///
/// Survivors of the last world go first, then those that joined first. A survivor keeps its rank; only if
/// the world has become too small for that rank does it move into a gap. Asked-for ranks are given where
/// they are free. The store stays where it is; else it goes to the survivor with the lowest rank, because
/// a survivor is known to be reachable by the others.
pub fn form(last: &[Advert], holder: usize, candidates: &[&Advert], max: usize) -> World {
    let rank_before = |agent: &Advert| last.iter().position(|member| member.is(agent));
    let (mut survivors, mut others): (Vec<_>, Vec<_>) = candidates
        .iter()
        .map(|&agent| (rank_before(agent), agent))
        .partition(|(rank, _)| rank.is_some());
    survivors.sort_by_key(|&(rank, _)| rank);
    survivors.append(&mut others);
    survivors.truncate(max);
    let chosen = survivors;

    let mut places: Vec<Option<&Advert>> = vec![None; chosen.len()];
    let mut homeless = Vec::new();
    for &(rank, agent) in &chosen {
        // Survivors come first, so no wish takes a survivor's rank.
        let wanted = rank.or(agent.node_rank.map(|rank| rank as usize));
        match wanted.and_then(|rank| places.get_mut(rank)) {
            Some(place @ None) => *place = Some(agent),
            _ => homeless.push(agent),
        }
    }
    let mut homeless = homeless.into_iter();
    let members: Vec<Advert> = places
        .into_iter()
        .filter_map(|place| place.or_else(|| homeless.next()))
        .cloned()
        .collect();

    let survives = |agent: &Advert| last.iter().any(|member| member.is(agent));
    let rank_now = |agent: &Advert| members.iter().position(|member| member.is(agent));
    let holder = last
        .get(holder)
        .and_then(rank_now)
        .or_else(|| members.iter().position(survives))
        .unwrap_or(0);
    World { members, holder }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::Address;

    fn agent(name: u32, wish: Option<u32>) -> Advert {
        Advert {
            node: format!("n{name}"),
            instance: 1,
            num_workers: 1,
            capabilities: BTreeSet::new(),
            node_rank: wish,
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

    fn formed(last: &[Advert], holder: usize, candidates: &[Advert], max: usize) -> World {
        form(last, holder, &candidates.iter().collect::<Vec<_>>(), max)
    }

    #[test]
    fn a_newcomer_takes_the_rank_of_the_lost() {
        let last: Vec<_> = (0..4).map(|n| agent(n, None)).collect();
        let now = [
            agent(9, None),
            agent(3, None),
            agent(0, None),
            agent(2, None),
        ];
        let world = formed(&last, 1, &now, 4);
        assert_eq!(names(&world), ["n0", "n9", "n2", "n3"]);
        assert_eq!(world.holder, 0, "the store goes to a survivor");
    }

    #[test]
    fn in_a_smaller_world_only_who_must_move_moves() {
        let last: Vec<_> = (0..4).map(|n| agent(n, None)).collect();
        let world = formed(
            &last,
            2,
            &[agent(1, None), agent(2, None), agent(3, None)],
            4,
        );
        assert_eq!(names(&world), ["n3", "n1", "n2"]);
        assert_eq!(world.holder, 2, "the store stays");
    }

    #[test]
    fn asked_for_ranks_are_given() {
        let now = [agent(7, Some(2)), agent(8, None), agent(9, Some(0))];
        assert_eq!(names(&formed(&[], 0, &now, 3)), ["n9", "n8", "n7"]);
        let far = [agent(7, Some(5)), agent(8, None)];
        assert_eq!(names(&formed(&[], 0, &far, 8)), ["n7", "n8"]);
    }

    #[test]
    fn a_restarted_agent_is_no_survivor() {
        let last = [agent(0, None), agent(1, None)];
        let mut again = agent(0, None);
        again.instance = 2;
        let world = formed(&last, 0, &[again, agent(1, None)], 2);
        assert_eq!(names(&world), ["n0", "n1"]);
        assert_eq!(world.holder, 1);
    }

    proptest! {
        #[test]
        fn a_survivor_keeps_its_rank(
            last in prop::collection::btree_set(0u32..20, 0..10),
            now in prop::collection::btree_set(0u32..20, 1..15),
            wishes in prop::collection::vec(prop::option::of(0u32..12), 20),
            holder in 0usize..10,
            max in 1usize..12,
        ) {
            let last: Vec<_> = last.into_iter().map(|n| agent(n, None)).collect();
            let now: Vec<_> = now.into_iter().map(|n| agent(n, wishes[n as usize])).collect();
            let world = formed(&last, holder, &now, max);
            prop_assert_eq!(world.members.len(), now.len().min(max));
            let distinct: BTreeSet<_> = names(&world).into_iter().collect();
            prop_assert_eq!(distinct.len(), world.members.len());
            for (rank, member) in world.members.iter().enumerate() {
                let before = last.iter().position(|other| other.is(member));
                if let Some(before) = before.filter(|&before| before < world.members.len()) {
                    prop_assert_eq!(before, rank);
                }
            }
            let survived = |agent: &Advert| last.iter().any(|other| other.is(agent));
            if world.members.iter().any(survived) {
                prop_assert!(survived(&world.members[world.holder]));
            }
        }
    }
}
