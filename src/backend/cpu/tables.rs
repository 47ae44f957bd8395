//! Page tables and reservoir groups of all live sequences.

use std::ops::Range;

use crate::backend::{EntryPlan, StepPlan};
use crate::geometry::Geometry;
use crate::growth::make_room;
use crate::residency::{Rule, Ruled};
use crate::table::HeadTable;

/// One head of one sequence.
#[derive(Debug, Default)]
pub(super) struct Head {
    pub table: HeadTable<Ruled>,
    /// The pages that were last selected for it, ascending, pinned ones left out.
    pub selected: Vec<u32>,
    /// The same of the last step that has finished, where scores are sticky.
    pub kept: Vec<u32>,
    /// The step at hand has made a selection. One that prefills, or whose attention is left out, has not.
    pub chosen: bool,
    /// A selection is due and has not been made, be it that the engine has left `attend` out in the step in which it fell due.
    pub selection_due: bool,
}

/// Heads in one flat list, so that the parallel tasks of a step can each hold one of them.
#[derive(Debug)]
pub(super) struct Tables {
    heads_per_sequence: usize,
    kv_heads: usize,
    rule: Rule,
    heads: Vec<Head>,
    /// Per sequence, per logical page that is sealed, its group in the reservoir.
    groups: Vec<Vec<u32>>,
}

impl Tables {
    pub(super) fn new(geometry: &Geometry, rule: Rule) -> Self {
        Tables {
            heads_per_sequence: geometry.heads(),
            kv_heads: geometry.kv_heads(),
            rule,
            heads: Vec::new(),
            groups: Vec::new(),
        }
    }

    pub(super) fn insert(&mut self, sequence: u32, pages: usize, ways: usize, selected: usize) {
        let count = (sequence as usize + 1).max(self.groups.len());
        self.groups.resize_with(count, Vec::new);
        self.heads.resize_with(count * self.heads_per_sequence, Head::default);
        self.groups[sequence as usize] = Vec::with_capacity(pages);
        for head in &mut self.heads[sequence_range(sequence, self.heads_per_sequence)] {
            *head = Head { table: HeadTable::with_order(self.rule.order()), ..Head::default() };
            head.table.reserve(pages, ways);
            head.selected.reserve(selected.min(pages));
            head.kept.reserve(selected.min(pages));
        }
    }

    pub(super) fn remove(&mut self, sequence: u32) {
        self.groups[sequence as usize] = Vec::new();
        self.heads[sequence_range(sequence, self.heads_per_sequence)].fill_with(Head::default);
    }

    /// Heads of a sequence, in the order of [`Geometry::head`].
    pub(super) fn heads(&self, sequence: u32) -> &[Head] {
        &self.heads[sequence_range(sequence, self.heads_per_sequence)]
    }

    pub(super) fn groups(&self, sequence: u32) -> &[u32] {
        &self.groups[sequence as usize]
    }

    /// The flat list, and where a head is in it.
    pub(super) fn all(&mut self) -> (&mut [Head], &[Vec<u32>]) {
        (&mut self.heads, &self.groups)
    }

    /// Index in the flat list.
    pub(super) fn index(&self, sequence: u32, layer: usize, kv_head: usize) -> usize {
        sequence as usize * self.heads_per_sequence + layer * self.kv_heads + kv_head
    }

    /// Takes over the groups and ways that a step has been granted.
    pub(super) fn grant(&mut self, plan: &StepPlan) {
        for entry in &plan.entries {
            let groups = &mut self.groups[entry.sequence as usize];
            make_room(groups, entry.groups.len());
            groups.extend_from_slice(&plan.groups[entry.groups.clone()]);
            let heads = &mut self.heads[sequence_range(entry.sequence, self.heads_per_sequence)];
            for way in &plan.ways[entry.ways.clone()] {
                heads[way.head as usize].table.grant(way.slot);
            }
            heads.iter_mut().for_each(|head| head.chosen = false);
            if entry.reselect {
                heads.iter_mut().for_each(|head| head.selection_due = true);
            }
        }
    }

    /// The step is final, and so are its selections.
    pub(super) fn keep_selections(&mut self, plan: &StepPlan) {
        for entry in &plan.entries {
            let heads = &mut self.heads[sequence_range(entry.sequence, self.heads_per_sequence)];
            for head in heads.iter_mut().filter(|head| head.chosen) {
                head.kept.clone_from(&head.selected);
            }
        }
    }

    /// Gives them up again and forgets the pages that the step has opened, of which `pages` is what was there before.
    pub(super) fn revoke(&mut self, plan: &StepPlan, entry: &EntryPlan, pages: usize) {
        let groups = &mut self.groups[entry.sequence as usize];
        groups.truncate(groups.len() - entry.groups.len());
        let heads = &mut self.heads[sequence_range(entry.sequence, self.heads_per_sequence)];
        for head in &mut *heads {
            while head.table.pages() > pages {
                head.table.close();
            }
            // What the step chose is not to stay chosen, so it is due as it was before.
            head.selection_due |= head.chosen;
        }
        for way in &plan.ways[entry.ways.clone()] {
            heads[way.head as usize].table.revoke();
        }
    }

    pub(super) fn table_bytes(&self) -> usize {
        let heads: usize = self
            .heads
            .iter()
            .map(|head| {
                let lists = head.selected.capacity() + head.kept.capacity();
                size_of::<Head>() + head.table.table_bytes() + lists * size_of::<u32>()
            })
            .sum();
        let groups: usize = self.groups.iter().map(|groups| groups.capacity() * size_of::<u32>()).sum();
        heads + groups
    }
}

fn sequence_range(sequence: u32, heads: usize) -> Range<usize> {
    sequence as usize * heads..(sequence as usize + 1) * heads
}
