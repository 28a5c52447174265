/* The search's defaults, but decisions come after guides and reference: they explain how, not how to. */
var Scorer = {
  score: (result) => (result[0].startsWith("adr/") ? result[4] - 100 : result[4]),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
