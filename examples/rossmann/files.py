"""The competition's files: their names and columns, with Spark's types."""

_WEATHER_MEASURES = [
    "Max_TemperatureC", "Mean_TemperatureC", "Min_TemperatureC", "Dew_PointC", "MeanDew_PointC", "Min_DewpointC",
    "Max_Humidity", "Mean_Humidity", "Min_Humidity", "Max_Sea_Level_PressurehPa", "Mean_Sea_Level_PressurehPa",
    "Min_Sea_Level_PressurehPa", "Max_VisibilityKm", "Mean_VisibilityKm", "Min_VisibilitykM", "Max_Wind_SpeedKm_h",
    "Mean_Wind_SpeedKm_h", "Max_Gust_SpeedKm_h", "Precipitationmm", "CloudCover",
]  # fmt: skip

# Files with one row of names, by name: the columns and their types in Spark.
SCHEMAS = {
    "train.csv": "Store int, DayOfWeek int, Date date, Sales int, Customers int, Open int, Promo int, "
    "StateHoliday string, SchoolHoliday int",
    "test.csv": "Id int, Store int, DayOfWeek int, Date date, Open int, Promo int, StateHoliday string, "
    "SchoolHoliday int",
    "store.csv": "Store int, StoreType string, Assortment string, CompetitionDistance double, "
    "CompetitionOpenSinceMonth int, CompetitionOpenSinceYear int, Promo2 int, Promo2SinceWeek int, "
    "Promo2SinceYear int, PromoInterval string",
    "store_states.csv": "Store int, State string",
    "state_names.csv": "StateName string, State string",
    "googletrend.csv": "file string, week string, trend int",
}
# weather/ holds a file for each state, named after it. Semicolons separate the columns.
WEATHER = f"Date date, {', '.join(f'{name} double' for name in _WEATHER_MEASURES)}, Events string, WindDirDegrees int"
